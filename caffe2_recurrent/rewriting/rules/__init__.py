"""The rules, in the order in which they follow each other."""

from caffe2_recurrent.rewriting.rules.activations import Activations
from caffe2_recurrent.rewriting.rules.backward_loop import BackwardLoop
from caffe2_recurrent.rewriting.rules.broadcasts import Broadcasts
from caffe2_recurrent.rewriting.rules.carried_states import CarriedStates
from caffe2_recurrent.rewriting.rules.chained_steps import ChainedSteps
from caffe2_recurrent.rewriting.rules.ended_sequences import EndedSequences
from caffe2_recurrent.rewriting.rules.executor_threads import ExecutorThreads
from caffe2_recurrent.rewriting.rules.filters_over_steps import FiltersOverSteps
from caffe2_recurrent.rewriting.rules.fixed_splits import FixedSplits
from caffe2_recurrent.rewriting.rules.forward_links import ForwardLinks
from caffe2_recurrent.rewriting.rules.gates_first import GatesFirst
from caffe2_recurrent.rewriting.rules.gradient_buffer import GradientBuffer
from caffe2_recurrent.rewriting.rules.gradient_in_place import GradientInPlace
from caffe2_recurrent.rewriting.rules.gradient_products import GradientProducts
from caffe2_recurrent.rewriting.rules.gru_unit import GRUUnits
from caffe2_recurrent.rewriting.rules.invariants import Invariants
from caffe2_recurrent.rewriting.rules.joined_gradients import JoinedGradients
from caffe2_recurrent.rewriting.rules.joined_sequence import JoinedSequence
from caffe2_recurrent.rewriting.rules.kept_rows import KeptRows
from caffe2_recurrent.rewriting.rules.lstm_unit import LSTMUnits
from caffe2_recurrent.rewriting.rules.merged_gates import MergedGates
from caffe2_recurrent.rewriting.rules.merged_sums import MergedSums
from caffe2_recurrent.rewriting.rules.nnpack_over_steps import NNPACKOverSteps
from caffe2_recurrent.rewriting.rules.one_workspace import OneWorkspace
from caffe2_recurrent.rewriting.rules.outer_products import OuterProducts
from caffe2_recurrent.rewriting.rules.packed_products import PackedProducts
from caffe2_recurrent.rewriting.rules.parameter_gradients import ParameterGradients
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.rewriting.rules.scaled_vectors import ScaledVectors
from caffe2_recurrent.rewriting.rules.scaled_weights import ScaledWeights
from caffe2_recurrent.rewriting.rules.score_gradients import ScoreGradients
from caffe2_recurrent.rewriting.rules.sequence_bias import SequenceBias
from caffe2_recurrent.rewriting.rules.sequence_gradient import SequenceGradient
from caffe2_recurrent.rewriting.rules.sequence_in_place import SequenceInPlace
from caffe2_recurrent.rewriting.rules.sequence_operators import SequenceOperators
from caffe2_recurrent.rewriting.rules.slices_in_place import SlicesInPlace
from caffe2_recurrent.rewriting.rules.transposed_weights import TransposedWeights
from caffe2_recurrent.rewriting.rules.unchanged_weights import UnchangedWeights
from caffe2_recurrent.rewriting.rules.unread_blobs import UnreadBlobs
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.rules.vector_gradients import VectorGradients
from caffe2_recurrent.rewriting.rules.vector_products import VectorProducts
from caffe2_recurrent.rewriting.rules.zero_gradients import ZeroGradients

RULES = (
    SequenceInPlace(),
    Invariants(),
    SequenceOperators(),
    ParameterGradients(),
    OuterProducts(),
    SequenceGradient(),
    VectorProducts(),
    TransposedWeights(),
    EndedSequences(),
    LSTMUnits(),
    GRUUnits(),
    GradientBuffer(),
    ScaledWeights(),
    ScaledVectors(),
    MergedSums(),
    ZeroGradients(),
    Activations(),
    ScoreGradients(),
    Broadcasts(),
    MergedGates(),
    SequenceBias(),
    GatesFirst(),
    JoinedSequence(),
    PackedProducts(),
    JoinedGradients(),
    FiltersOverSteps(),
    ProductsOverSteps(),
    NNPACKOverSteps(),
    GradientProducts(),
    VectorGradients(),
    FixedSplits(),
    UnreadBlobs(),
    ForwardLinks(),
    ExecutorThreads(),
    BackwardLoop(),
    SlicesInPlace(),
    CarriedStates(),
    GradientInPlace(),
    OneWorkspace(),
    UnrolledSteps(),
    ChainedSteps(),
    KeptRows(),
    UnchangedWeights(),
)
