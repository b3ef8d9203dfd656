"""KV capacity: how many tokens of KV one instance of a model holds, and the fewest GPUs that hold a useful number.

usable memory of a GPU  =  (memory - reserved) * fraction          unless given
memory for KV           =  usable - weights - activations
tokens of a group       =  memory for KV / bytes of one token's KV on one GPU
tokens                  =  groups * tokens of a group
"""

from __future__ import annotations

from dataclasses import dataclass

from kllm.costs.errors import CostError, DoesNotFitError
from kllm.costs.hardware import Hardware
from kllm.costs.layout import Layout, layouts_of
from kllm.costs.model_specs import ModelSpec
from kllm.costs.weights import rank_weights

# Less of the usable memory than this for KV, and a layout only just fits: it would hold a handful of requests.
USEFUL_KV_FRACTION = 0.1


@dataclass(frozen=True)
class Deployment:
    """A model on a kind of hardware; what is None is what is usual for the model or the hardware.

    mtp: with the MTP layer, its weights and its KV. usable_bytes, activation_bytes: per GPU.
    """

    model: ModelSpec
    hardware: Hardware
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    mtp: bool = False
    usable_bytes: float | None = None
    activation_bytes: float | None = None


@dataclass(frozen=True)
class Capacity:
    """What one instance holds. Bytes are per GPU unless said otherwise; every GPU of a layout is alike.

    kv_bytes_per_token: of the whole model, once. kv_bytes_per_token_per_gpu: what a GPU of the token's group keeps.
    tokens: of all groups together. tokens_per_group: what one request can have at most.
    state_bytes_per_request: kept per running request besides, and not in `tokens`.
    """

    model: str
    hardware: str
    layout: Layout
    weights_dtype: str
    kv_dtype: str
    mtp: bool
    usable_bytes_per_gpu: int
    activation_bytes_per_gpu: int
    weight_bytes_per_gpu: int
    kv_bytes_per_gpu: int
    kv_bytes_per_token: float
    kv_bytes_per_token_per_gpu: float
    state_bytes_per_request: int
    tokens_per_group: int
    tokens: int
    dollars_per_hour: float

    @property
    def useful(self) -> bool:
        """Whether a fair part of the memory is left for KV."""
        return self.kv_bytes_per_gpu >= USEFUL_KV_FRACTION * self.usable_bytes_per_gpu


def kv_capacity(deployment: Deployment, layout: Layout) -> Capacity:
    """Capacity of one instance in this layout.

    Raises DoesNotFitError if it does not fit, CostError if the layout does not suit or a format is unknown.
    """
    model, hardware = deployment.model, deployment.hardware
    layout.check(model, hardware)
    spec = model.with_mtp() if deployment.mtp else model
    weights_dtype = (deployment.weights_dtype or model.weights_dtype).lower()
    kv_dtype = (deployment.kv_dtype or model.kv_dtype).lower()
    usable = int(hardware.usable_bytes if deployment.usable_bytes is None else deployment.usable_bytes)
    given = deployment.activation_bytes
    activations = int(hardware.activation_bytes if given is None else given)
    weights = round(rank_weights(spec, layout, weights_dtype).bytes)
    per_token = spec.attention.kv_bytes(kv_dtype)
    per_token_per_gpu = per_token / layout.kv_shards(spec)
    left = usable - weights - activations
    group = int(left // per_token_per_gpu)
    if group < 1:
        raise DoesNotFitError(
            f"{model.name} does not fit: {layout} on {hardware.name} needs {weights / 1e9:.1f} GB of weights and "
            f"{activations / 1e9:.1f} GB of activations on each GPU, {usable / 1e9:.1f} GB are usable"
        )
    return Capacity(
        model=model.name,
        hardware=hardware.name,
        layout=layout,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        mtp=deployment.mtp,
        usable_bytes_per_gpu=usable,
        activation_bytes_per_gpu=activations,
        weight_bytes_per_gpu=weights,
        kv_bytes_per_gpu=left,
        kv_bytes_per_token=per_token,
        kv_bytes_per_token_per_gpu=per_token_per_gpu,
        state_bytes_per_request=spec.attention.row_bytes(kv_dtype),
        tokens_per_group=group,
        tokens=group * layout.dp,
        dollars_per_hour=layout.gpus * hardware.dollars_per_hour,
    )


def best_layout(deployment: Deployment, gpus: int) -> Capacity:
    """The modelled layout on exactly this many GPUs that holds most tokens; the widest tp of equal ones.

    Raises DoesNotFitError if none fits, CostError if there is none or a format is unknown.
    """
    model, hardware = deployment.model, deployment.hardware
    fitting: list[Capacity] = []
    reasons: list[DoesNotFitError] = []
    for layout in layouts_of(gpus, model, hardware):
        try:
            fitting.append(kv_capacity(deployment, layout))
        except DoesNotFitError as error:
            reasons.append(error)
    if fitting:
        return max(fitting, key=lambda found: found.tokens)
    if reasons:
        raise reasons[0]
    raise CostError(f"{model.name} has no layout here on {gpus} {hardware.name}")


def smallest_gpus(deployment: Deployment) -> Capacity:
    """The smallest power of two of GPUs that leaves USEFUL_KV_FRACTION of its memory for KV, in its best layout.

    Raises DoesNotFitError if no number up to eight nodes does, CostError if a format is unknown.
    """
    model, hardware = deployment.model, deployment.hardware
    reason = DoesNotFitError(f"{model.name} has no layout here on {hardware.name}")
    gpus = 1
    while gpus <= 8 * hardware.gpus_per_node and layouts_of(gpus, model, hardware):
        try:
            found = best_layout(deployment, gpus)
        except DoesNotFitError as error:
            reason = error
        else:
            if found.useful:
                return found
            reason = DoesNotFitError(f"{model.name} leaves hardly any memory for KV on {gpus} {hardware.name}")
        gpus *= 2
    raise reason
