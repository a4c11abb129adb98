"""Synthetic runs with a known answer, for tests of ddpan and of what is built on it.

    from ddpan.analysis.testing import Fault, Scenario, simulate, write_log
    scenario = Scenario(ranks=4, steps=200, faults=(Fault(rank=1, cause="backward", delay_ns=20_000_000),))
    write_log(simulate(scenario), "logs")

or, without a log, ``stragglers(open_run(simulate(scenario)))``.

A scenario follows the order of events of DistributedDataParallel: bucket k of a step ends on all ranks together, when
the last rank has launched it and its predecessor has ended; a rank begins its next step when its backward has ended.
"""

from .log import write_log
from .memory import open_run
from .scenario import CAUSES, Fault, Scenario
from .simulation import SyntheticRun, simulate

__all__ = ["CAUSES", "Fault", "Scenario", "SyntheticRun", "open_run", "simulate", "write_log"]
