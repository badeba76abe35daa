"""Turn a serial model into a tensor-parallel one, by the table that it declares."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mpiscale.comm.communicator import Communicator
from mpiscale.nn.attention import Attention
from mpiscale.nn.language_model import (
    CrossEntropyLoss,
    Cut,
    LanguageModel,
    Sampler,
    VocabularyHead,
)
from mpiscale.nn.layers import Embedding, Linear
from mpiscale.nn.module import Module
from mpiscale.parallel.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)
from mpiscale.parallel.tensor_parallel.head_parallel_attention import cut_heads
from mpiscale.parallel.tensor_parallel.row_parallel_linear import RowParallelLinear
from mpiscale.parallel.tensor_parallel.vocab_parallel_cross_entropy import (
    VocabParallelCrossEntropy,
    VocabParallelSampler,
)
from mpiscale.parallel.tensor_parallel.vocab_parallel_embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
)
from mpiscale.parallel.tied_parameters import Tie


def tensor_parallelize(model: LanguageModel, comm: Communicator) -> None:
    """Cut `model` over the ranks of `comm`, in place, before it is materialised.

    Collective over `comm`. Parameter names stay those of the serial model; parameters
    that are not cut are declared equal on all ranks.

    Raises:
        InputError: if heads or features cannot be cut evenly.
        ValueError: if the model's table names a part that it does not have.
    """

    @cache
    def replica_group(n: int) -> Communicator:
        return comm.Split(comm.rank // n, comm.rank)

    for pattern, kind in model.TENSOR_PARALLEL.items():
        parts = [(p, m) for p, m in model.named_modules() if matches(p, pattern)]
        if not parts:
            raise ValueError(
                f"TENSOR_PARALLEL names {pattern!r}, which matches nothing"
            )
        for path, whole in parts:
            model.replace(path, _cut(whole, kind, model, comm, replica_group))
    for parameter in model.parameters():
        if parameter.shard is None:
            parameter.ties.append(Tie(comm, "same"))


def matches(path: str, pattern: str) -> bool:
    """Whether `path` fits `pattern`, in which * stands for one name."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(
        w in ("*", n) for n, w in zip(names, wanted, strict=True)
    )


def _cut(
    whole: Module,
    kind: Cut,
    model: LanguageModel,
    comm: Communicator,
    replica_group: Callable[[int], Communicator],
) -> Module:
    """The parallel counterpart of one serial part."""
    match kind, whole:
        case "column", Linear():
            return ColumnParallelLinear(whole, comm)
        case "row", Linear():
            return RowParallelLinear(whole, comm)
        case "heads", Attention():
            return cut_heads(whole, comm, replica_group)
        case "vocabulary", Embedding():
            return VocabParallelEmbedding(whole, comm)
        case "vocabulary", VocabularyHead():
            return VocabParallelHead(whole, comm)
        case "vocabulary", CrossEntropyLoss():
            return VocabParallelCrossEntropy(whole, comm, model.vocabulary)
        case "vocabulary", Sampler():
            return VocabParallelSampler(whole, comm, model.vocabulary)
    raise ValueError(f"a {type(whole).__name__} cannot be cut by {kind!r}")
