"""Random step nets: a few states, operators that need their values for the gradient or do not, in place or not.

Drawn from an integer seed, so that a failure names the one number that repeats it; Hypothesis draws the seed and
what surrounds it.
"""

import random

import numpy as np

import comparing
import step_nets

LARGEST_OUTPUT = 20

ONE_INPUT = ["Tanh", "Sigmoid", "Negative", "Scale", "FC", "Copy"]
# Their gradient reads their output, so that the output must stay as it is.
NEED_OUTPUT = {"Tanh", "Sigmoid"}
NEED_INPUTS = {"Copy", "FC", "Mul"}


class _Program:
    def __init__(self, seed, sequences, names_again, added):
        self.draw = random.Random(seed)
        self.names_again = names_again
        self.make = step_nets.Maker(seed % 2**32)
        self.sequences = [self.make.sequence(name) for name in ["x_t", "y_t", "z_t"][:sequences]]
        self.states = [self.make.state(name) for name in "abc"[: self.draw.randint(1, 3)]]
        if added:
            self.sequences = [self.with_product(blob) for blob in self.sequences]
        self.readable = self.sequences + self.states
        self.readable += [
            self.make.reference("r{}".format(n), 1, step_nets.N, step_nets.D) for n in range(self.draw.randint(0, 2))
        ]
        self.written, self.frozen, self.count = [], set(), 0
        # Builders differ over gradients that pass through or do not arrive: half of the nets have neither.
        self.tidy = self.draw.random() < 0.5
        self.two_inputs = ["Mul"] if self.tidy else ["Sum", "Mul", "Mul"]

    def with_product(self, sequence):
        """The slice of a sequence and a product of a state, squashed half of the time."""
        product = self.make.fc(self.draw.choice(self.states), "{}_added".format(sequence))
        total = self.make.cell.Sum([product, sequence], ["{}_total".format(sequence)])
        if self.draw.random() < 0.5:
            return total
        return self.make.cell.Tanh(total, ["{}_squashed".format(sequence)])

    def operator(self):
        two = self.draw.random() < 0.5
        kind = self.draw.choice(self.two_inputs if two else ONE_INPUT)
        inputs = [self.draw.choice(self.readable) for _ in range(2 if two else 1)]
        self.count += 1
        output = "v{}".format(self.count)
        loose = [blob for blob in self.written if blob not in self.frozen]
        may_be_in_place = kind not in ("FC", "Copy", "Negative") and (kind != "Mul" or self.names_again)
        if may_be_in_place and loose and self.draw.random() < 0.4:
            inputs[0] = output = self.draw.choice(loose)
            # Only the first input of Sum may be written in place.
            inputs[1:] = [self.readable[0] if blob == output else blob for blob in inputs[1:]]
        elif self.names_again and kind != "FC" and loose and self.draw.random() < 0.3:
            output = self.draw.choice(loose)
            inputs = [self.readable[0] if blob == output else blob for blob in inputs]
        net = self.make.cell
        if kind == "FC":
            result = self.make.fc(inputs[0], output)
        elif kind == "Scale":
            # Caffe2's builder mixes up the order of operators that are equal; no two are.
            result = net.Scale(inputs, [output], scale=0.5 + 0.01 * self.count)
        else:
            result = getattr(net, kind)(inputs, [output])
        if kind in NEED_INPUTS:
            # Of what it overwrites itself the step keeps a copy.
            self.frozen.update(blob for blob in inputs if blob != output)
        if kind in NEED_OUTPUT:
            self.frozen.add(result)
        if result not in self.written:
            self.written.append(result)
            self.readable.append(result)


def step_net(seed, sequences=1, operators=8, names_again=False, added=False):
    """A random `StepNet`; its state outputs are the blobs written last, so that most operators matter.

    With `names_again` values that are no longer needed leave their names to others, and Mul may work in place; Caffe2's
    builder is wrong about both. With `added` a sequence is read only where it is added to a product of a state, as in
    most cells.

    Products may grow without bound over the steps, where rounding is all there is: such a net is drawn again.
    """
    while True:
        found = _draw(seed, sequences, operators, names_again, added)
        if max(np.abs(output).max() for output in comparing.reference_outputs(found)) < LARGEST_OUTPUT:
            return found
        seed += 2**32


def _draw(seed, sequences, operators, names_again, added):
    program = _Program(seed, sequences, names_again, added)
    for _ in range(program.draw.randint(3, operators)):
        program.operator()
    while len(program.written) < len(program.states):
        program.operator()
    outputs = _depending_on_all(program) if program.tidy else program.written[-len(program.states) :]
    program.draw.shuffle(outputs)
    for state, output in zip(program.states, outputs):
        program.make.link(state, output)
    return program.make.done()


def _depending_on_all(program):
    """An output for each state that depends on every state and sequence."""
    net = program.make.cell
    everything = net.Mul([program.states[0], program.sequences[0]], ["everything0"])
    for number, blob in enumerate(program.states[1:] + program.sequences[1:], start=1):
        everything = net.Mul([everything, net.Sigmoid(blob, "s{}".format(number))], ["everything{}".format(number)])
    return [
        net.Mul([everything, program.make.fc(blob, "u{}".format(number))], ["out{}".format(number)])
        for number, blob in enumerate(program.draw.sample(program.written, len(program.states)))
    ]


def recomputable(step_net, draw):
    """A random set of blobs whose operators can run again: those that no operator outside the set overwrites."""
    operators = step_net.cell.Proto().op
    writers = {}
    for operator in operators:
        for output in operator.output:
            writers.setdefault(output, []).append(operator)
    chosen = {blob for blob in writers if draw.random() < 0.5}
    while True:
        needed = {
            blob
            for name in chosen
            for operator in writers[name]
            for blob in operator.input
            if len(writers.get(blob, ())) > 1
        }
        if needed <= chosen:
            return sorted(chosen)
        chosen |= needed
