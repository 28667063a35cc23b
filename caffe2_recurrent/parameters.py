"""Parameters of a cell, made through the model so that its optimizers find them and scopes can share them."""

import contextlib
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.initializers import ExternalInitializer, Initializer
from caffe2.python.modeling.parameter_info import ParameterTags
from caffe2.python.modeling.parameter_sharing import parameter_sharing_context

from caffe2_recurrent.problems import Problems
from caffe2_recurrent.transaction import all_or_nothing


class ParameterSpec(NamedTuple):
    """A parameter to be: name under the current scope, shape, the operator that fills it, and its tag if any."""

    name: str
    shape: List[int]
    fill: Initializer
    tag: Optional[str] = None


def fc_specs(name: str, dim_in: int, dim_out: int) -> List[ParameterSpec]:
    """`<name>_w` and `<name>_b`, filled as `brew.fc` fills them."""
    return [
        ParameterSpec(name + "_w", [dim_out, dim_in], Initializer("XavierFill"), ParameterTags.WEIGHT),
        ParameterSpec(name + "_b", [dim_out], Initializer("ConstantFill"), ParameterTags.BIAS),
    ]


def scoped_name(name: str) -> core.BlobReference:
    """Where a parameter of this name is: under the current scope, or the one that shares its parameters with it."""
    return core.BlobReference(parameter_sharing_context.get_parameter_name(name))


@contextlib.contextmanager
def building(
    caller: str, model: ModelHelper, scope: str, specs: Sequence[ParameterSpec]
) -> Iterator[Dict[str, core.BlobReference]]:
    """Within the scope, the parameters by name; if the block fails, the model is as it was before."""
    with all_or_nothing(model), core.NameScope(scope):
        problems = Problems(caller)
        check_shapes(model, specs, problems)
        problems.raise_if_any()
        yield {spec.name: blob for spec, blob in zip(specs, create(model, specs))}


def check_shapes(model: ModelHelper, specs: Sequence[ParameterSpec], problems: Problems) -> None:
    """Note parameters that the model has already, shared or of the same scope, with another shape."""
    for spec in specs:
        name = scoped_name(spec.name)
        known = model.get_param_info(name)
        if known is not None and list(known.shape or spec.shape) != spec.shape:
            problems.add("parameter '{}' has shape {}, but this cell needs {}", name, list(known.shape), spec.shape)


def create(model: ModelHelper, specs: Sequence[ParameterSpec]) -> List[core.BlobReference]:
    """Create the parameters, or take those of that name that the model has already."""
    return [_create_one(model, spec) for spec in specs]


def _create_one(model: ModelHelper, spec: ParameterSpec) -> core.BlobReference:
    name = scoped_name(spec.name)
    if name in model.params and model.get_param_info(name) is None:
        # Made by an older script, which filled it and added it to model.params by hand.
        return name
    fill = spec.fill if model.init_params else ExternalInitializer()
    return model.create_param(spec.name, spec.shape, fill, tags=spec.tag)
