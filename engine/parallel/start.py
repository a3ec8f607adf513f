"""Start a model over several ranks: the processes, their weights, one pool size, one group."""

import msgspec

from ...engine_core.worker import WorkerFailed
from ..device_memory import DeviceMemory
from ..models import GpuModel, Share
from ..rank_worker import Site, load_rank, make_worker
from ..weights import TensorSource, WholeTensors
from ..worker import EngineWorker
from .bounded import unless
from .group import Group
from .messages import OpenPool, RankLoaded, RankReady
from .ranks import Ranks
from .sharding import ShardedTensors
from .worker import ParallelGraphWorker, ParallelWorker

_EXPLAIN_S = 0.5  # joining may break off before the exit status that explains it is known


def start_ranks(site: Site) -> tuple[EngineWorker, DeviceMemory]:
    """A worker over ``site.config.tp_size`` ranks, of which this process is rank 0, and
    the memory of its device.

    Raises RefusedError naming the flag or variable, WorkerFailed when a rank ends while it starts.
    """
    group = Group(0, site.config.tp_size, site.device)
    ranks = Ranks(
        msgspec.structs.replace(site.config, device=site.placement.device, num_threads=site.threads)
    )
    try:
        loaded = load_rank(site, share_of(site, group))
        pages = min(site.plan.num_pages, *(rank.num_pages for rank in ranks.gather(RankLoaded)))
        ranks.send(OpenPool(pages))
        _join(group, ranks)
        worker = make_worker(loaded, pages, group)
        ranks.gather(RankReady)
    except BaseException:
        ranks.end(0.0)
        group.leave()
        raise
    kind = ParallelGraphWorker if isinstance(loaded.model, GpuModel) else ParallelWorker
    return kind(worker, ranks, group), loaded.memory


def _join(group: Group, ranks: Ranks) -> None:
    """Meet the other ranks. Raises WorkerFailed as soon as one has ended, RuntimeError if one does
    not come in time.
    """
    try:
        joined = unless(lambda: group.join(ranks.store), lambda: ranks.lost() is not None)
    except RuntimeError as error:
        lost = ranks.explain(_EXPLAIN_S)
        if lost is None:
            raise
        raise WorkerFailed(lost) from error
    if not joined:
        lost = ranks.explain()
        assert lost is not None
        raise WorkerFailed(lost)


def share_of(site: Site, group: Group) -> Share:
    """What this rank takes of the weights, how it sums with the others, whether it decides."""

    def cut(source: WholeTensors) -> TensorSource:
        return ShardedTensors(source, site.whole, group.rank, group.size)

    return Share(cut, group.reduce, group.leads)
