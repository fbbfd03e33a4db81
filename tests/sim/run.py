"""Run one simulated world: from its begin, through what goes wrong, to the calm in which all has to come right."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

from tests.sim import content
from tests.sim.agents import Agent, AgentLife
from tests.sim.cluster import SERVER, Cluster, Life
from tests.sim.fibers import Spinning
from tests.sim.judge import Violation
from tests.sim.roles import Reader, Replica, Trainer
from tests.sim.scenario import CALM_S, DATA_FAULTS, Fault, Scenario
from tests.sim.shims import installed

SETTLE_S = 60.0
FAIR = ("DeadlineExceeded", "VersionUnavailable")
"""What a caller may hear though nothing goes wrong: there was nothing new, or it was taken back."""
END_S = 40.0


@dataclass
class Result:
    """How a world ended: `error` None if everything held."""

    scenario: Scenario
    error: BaseException | None
    lines: list[str]
    trace_hash: str
    steps: int
    calls: dict[str, int]
    failures: dict[str, int]
    virtual_s: float


class World:
    """One run."""

    def __init__(self, scenario: Scenario, traced: bool = False) -> None:
        self.scenario = scenario
        worth = 0 if scenario.queues else 1 << 30
        machine = {"worth_waiting_bytes": worth, "retain": scenario.retain, "policy": scenario.policy}
        machine["agent_within_s"] = scenario.agent_within_s
        self.cluster = Cluster(scenario.seed, machine, scenario.zones, scenario.hosts)
        self.cluster.plane.one_sided = scenario.one_sided
        judge = self.cluster.judge
        judge.traced = traced
        if traced:
            judge.lines = []
            self.cluster.network.trace = judge.sent
        self.replicas: list[Replica] = []
        self.agents: list[Agent] = []
        self.over = False
        self.settle_s = 0.0

    def run(self) -> Result:
        """Run to the end."""
        cluster, error = self.cluster, None
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with installed(cluster.timeline, cluster.stand_ins()):
                try:
                    self._run()
                except (Exception, Spinning) as caught:
                    error = caught
                finally:
                    judge, now = cluster.judge, cluster.now
                    cluster.end()
        finally:
            logging.disable(disabled)
        lines = judge.lines or []
        return Result(self.scenario, error, lines, judge.hash, judge.steps, judge.good, judge.errors, now - 1000.0)

    def _run(self) -> None:
        cluster = self.cluster
        cluster.network.hub.start()
        cluster.play("director", self._direct)
        begin = cluster.now
        for fault in self.scenario.faults:
            cluster.timeline.at(begin + fault.at_s, lambda fault=fault: self._strike(fault))
        cluster.timeline.run(begin + CALM_S + SETTLE_S + 6 * END_S, lambda: self.over)
        if not self.over:
            raise Violation("the world does not come to its end")

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        cluster, now = self.cluster, self.cluster.now
        net, hub = cluster.network, cluster.network.hub
        slots = [slot for replica in self.replicas for slot in replica.slots]
        if not slots:
            return
        life = slots[fault.target % len(slots)].life
        if life is None:
            return  # an agent that is late
        cluster.judge.note(f"fault {fault.kind} at {life.name} for {fault.for_s:.1f} s")
        match fault.kind:
            case "kill":
                cluster.kill(life)
            case "twin":  # another process takes the place of one that lives on for a while
                cluster.boot(life.slot)
                cluster.timeline.after(fault.for_s, lambda: cluster.kill(life))
            case "pause":
                cluster.pause(life, fault.for_s)
            case "leave":
                self._leave(life)
            case "cut":
                net.cut(life.name)
            case "partition":
                net.weather.blocked_until[life.name] = now + fault.for_s
            case "clog_up" | "clog_down":
                net.weather.clogged[life.name, fault.kind == "clog_up"] = (now + fault.for_s, 2 * fault.strength)
            case "hub_kill":
                hub.kill()
                cluster.timeline.after(fault.for_s, hub.start)
            case "hub_pause":
                hub.paused_until = now + fault.for_s
            case "hub_partition":
                net.weather.blocked_until["hub"] = now + fault.for_s
            case _:
                self._spoil(life, fault)

    def _spoil(self, life: Life, fault: Fault) -> None:
        """Let reads from a process go wrong in one way."""
        plane = self.cluster.plane
        assert fault.kind in DATA_FAULTS
        plane.kinds = (fault.kind,)
        plane.rates[life.name] = fault.strength
        self.cluster.timeline.after(fault.for_s, lambda: plane.rates.pop(life.name, None) and None)

    def _leave(self, life: Life) -> None:
        """Let a process close its worker and end."""
        cluster = self.cluster
        if isinstance(life, AgentLife):
            life.stopping = True
            return

        def close() -> None:
            cluster.ask(life, "close", lambda worker: worker.close(), 15.0, True).result()
            cluster.kill(life)

        cluster.play(f"leave {life.name}", close)

    # --- the calm ---------------------------------------------------------------------------------------------------

    def _direct(self) -> None:
        cluster, scenario = self.cluster, self.scenario
        begin = cluster.now
        trainer = Trainer(cluster, "trainer", 2, scenario.seed)
        readers = [Reader(cluster, f"r{n}", shards, scenario.seed) for n, shards in enumerate(scenario.readers)]
        self.agents = [Agent(cluster, plan, scenario.seed) for plan in scenario.agents]
        self.replicas = [trainer, *readers, *self.agents]
        for replica in self.replicas:
            cluster.play(replica.name, replica.play)
        cluster.sleep(begin + CALM_S - cluster.now)
        cluster.judge.note("calm")
        for replica in self.replicas:
            replica.calm = True
        self._calm_weather()
        if not scenario.faults:
            self._one_crosses()
        for agent in self.agents:
            agent.rest()
        if not cluster.await_that(lambda: trainer.resting, SETTLE_S):
            raise Violation("the trainer cannot publish, though nothing goes wrong any more")
        self._settle(trainer, readers)
        stays = not scenario.hub_kill_at_rest and all(plan.at_rest == "holds" for plan in scenario.agents)
        if not scenario.faults and stays:
            self._one_crosses()
            self._all_was_well()
        self._end(trainer, readers)
        self.over = True

    def _calm_weather(self) -> None:
        cluster = self.cluster
        cluster.plane.rates.clear()
        cluster.network.weather.blocked_until.clear()
        cluster.network.weather.clogged.clear()

    def _settle(self, trainer: Trainer, readers: list[Reader]) -> None:
        """Everybody gets the last version, also who comes late, also after the hub has died once more."""
        cluster = self.cluster
        number = trainer.number
        if self.scenario.hub_kill_at_rest:
            cluster.sleep(0.5)
            cluster.network.hub.kill()
            cluster.timeline.after(0.3, cluster.network.hub.start)
        if self.scenario.joins_at_rest:
            readers.append(Reader(cluster, "late", 2, self.scenario.seed))
        until_s = cluster.now + SETTLE_S
        who = (*readers, *self.agents)
        for reader in who:
            cluster.play(f"settle {reader.name}", lambda reader=reader: reader.settle(number, until_s))
        if not cluster.await_that(lambda: all(reader.resting for reader in who), SETTLE_S + END_S):
            raise Violation("some reader never comes to rest")
        self.settle_s = cluster.now + SETTLE_S - until_s

    def _all_was_well(self) -> None:
        """Where nothing went wrong, nobody was taken for gone, and no call failed for want of a server or a peer."""
        odd = {name: count for name, count in self.cluster.judge.errors.items() if name not in FAIR}
        if odd or self.cluster.judge.silences:
            silent = self.cluster.judge.silences
            raise Violation(f"nothing went wrong, but {silent} were taken for gone, and calls failed: {odd}")

    def _one_crosses(self) -> None:
        """Where nothing went wrong, one agent of a zone read each version across, while one lived, and nobody else."""
        watch = self.cluster.judge.zones
        for (zone, key), replicas in watch.crossed.items():
            if len(replicas) > 1 or not replicas <= watch.agents:
                raise Violation(f"nothing went wrong, but {sorted(replicas)} read {key} across into {zone!r}")
        for zone in {plan.zone for plan in self.scenario.agents if plan.at_s == 0.0}:
            versions = 2 + sum(where == zone for where, _ in watch.crossed)  # some began before the agent came
            if watch.crossed_bytes[zone] > versions * content.MOST_BYTES:
                raise Violation(f"{watch.crossed_bytes[zone]} bytes of {versions} versions came into {zone!r}")

    def _end(self, trainer: Trainer, readers: list[Reader]) -> None:
        """Nothing is left over: no lease, no drain, no round; everybody can take its copy back and leave."""
        cluster = self.cluster
        cluster.sleep(SERVER["dead_after_s"] + 2.0 if self.agents else 1.0)  # agents that died have no successor
        state = cluster.network.hub.state
        rounds = [r for model in state.models.values() for g in model.groups.values() for r in g.rounds.values()]
        if state.leases or state.draining or any(r.verdict is None for r in rounds):
            raise Violation(f"left over: leases {sorted(state.leases)}, drains {state.draining}, rounds {rounds}")
        ends = trainer.all("unpublish", lambda worker, life: trainer.unpublish(worker, life, 5.0), 5.0)
        if not all(end.good for end in ends):
            raise Violation(f"the trainer cannot take its last version back: {[str(end.error) for end in ends]}")
        for agent in self.agents:
            agent.stop()
        for replica in (trainer, *readers):
            for end in replica.all("close", lambda worker, _: worker.close(), 12.0, True):
                if not end.good:
                    raise Violation(f"{replica.name} cannot close: {end.error}")


def simulate(scenario: Scenario, traced: bool = False) -> Result:
    """Run a world; never raises for what happens inside it."""
    collecting = gc.isenabled()
    gc.disable()  # a collection at another moment would run finalizers at another moment
    try:
        return World(scenario, traced).run()
    finally:
        if collecting:
            gc.enable()
