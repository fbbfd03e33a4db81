"""Zones with seed agents (`tensorhub seed --zone Z`): when what is newest elsewhere is held back from them (law L10).

While an agent of a zone lives, `latest` means to everybody else there the newest version that has been whole in the
zone: they go on with what they serve until the agent has brought the next one across. The zone does not wait for an
agent that is silent or gone, nor, until it comes on again, for one that did not come on for `agent_within_s`. That
counts from when there was something to bring, whatever is published meanwhile, and only bytes beyond what was there
before count: agents that start again and again hold nothing up for ever.
"""

from __future__ import annotations

from itertools import chain

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.lead import Lead
from tensorhub_core.state.records import Copy, CopyState, Group, ModelState, Worker


def holds_back(s: Step, model: ModelState, zone: str, newest: VersionKey) -> bool:
    """Tell whether the newest version, which is whole elsewhere, is not to be seen in a zone yet."""
    lead = model.leads.get(zone)
    return lead is not None and not lead.late and is_behind(lead, newest) and has_agent(s, model, lead)


def is_behind(lead: Lead, newest: VersionKey | None) -> bool:
    """Tell whether a version has never been whole in a zone, nor any newer one."""
    return newest is not None and (lead.newest is None or lead.newest < newest)


def has_agent(s: Step, model: ModelState, lead: Lead) -> bool:
    """Tell whether some agent of a zone lives: all its workers are there, none is silent or about to leave."""
    return any(_lives(s, model.groups[replica]) for replica in lead.agents)


def _lives(s: Step, group: Group) -> bool:
    workers = s.members(group)
    return len(workers) == group.num_shards and not any(w.suspected or w.leaving for w in workers)


def is_there(s: Step, model: ModelState, zone: str, key: VersionKey) -> bool:
    """Tell whether some replica of a zone offers a version whole; its agents are looked at first."""
    near = (model.groups[r] for r in chain(model.leads[zone].agents, model.finished.get(key, ())))
    return any(group.zone == zone and _offers(s, group, key) for group in near)


def _offers(s: Step, group: Group, key: VersionKey) -> bool:
    workers = s.members(group)
    offered = all(not w.suspected and w.copy_of(key, (CopyState.PUBLISHED,)) is not None for w in workers)
    return offered and len(workers) == group.num_shards


def nothing_yet(model: ModelState, zone: str) -> str:
    """Say why there is no `latest` in a zone."""
    if model.high is None:
        return f"model {model.name!r} has no version yet"
    text = f"none has been in zone {zone!r} that is there now, and its seed agents bring version {model.high[1]}"
    return f"model {model.name!r}: {text}"


def note_group(s: Step, model: ModelState, group: Group) -> None:
    """Take note of what a replica is when one of its workers says hello."""
    for zone, lead in model.leads.items():
        if group.replica in lead.agents and not (group.seeds and group.zone == zone):
            del lead.agents[group.replica]
            s.touched.add(model.name)
    if not group.seeds or not group.zone:
        return
    if group.zone not in model.leads:
        kept = {other.zone for other in model.groups.values()}
        model.leads = {zone: lead for zone, lead in model.leads.items() if zone in kept}
        model.leads[group.zone] = Lead(_newest_in(s, model, group.zone), since_s=s.now)
    model.leads[group.zone].agents[group.replica] = None


def _newest_in(s: Step, model: ModelState, zone: str) -> VersionKey | None:
    """Return the newest version that is whole in a zone."""
    for key in sorted(model.finished, reverse=True):
        if any(model.groups[r].zone == zone and _offers(s, model.groups[r], key) for r in model.finished[key]):
            return key
    return None


def note_gone(s: Step, model: ModelState, group: Group) -> None:
    """Take note that a replica is no more."""
    lead = model.leads.get(group.zone)
    if lead is not None and group.replica in lead.agents:
        del lead.agents[group.replica]


def note_absent(s: Step, worker: Worker) -> None:
    """Take note that a worker is silent, leaves or is gone: nobody waits for the last agent of a zone then."""
    if not worker.observer and s.group(worker).seeds:
        s.touched.add(worker.model)


def note_whole(s: Step, model: ModelState, group: Group, key: VersionKey) -> None:
    """Take note that a version is whole at a replica: from now on it is there for all of its zone."""
    lead = model.leads.get(group.zone)
    if lead is None:
        return
    if is_behind(lead, key):
        lead.newest = key
        s.touched.add(model.name)
    if group.replica in lead.agents and (lead.brought is None or key > lead.brought):
        lead.brought = key
        _comes_on(s, lead)


def note_newer(s: Step, model: ModelState, before: VersionKey | None) -> None:
    """Take note that a version newer than `before` is whole: agents that had brought that one begin with this one."""
    for lead in model.leads.values():
        if lead.brought == before:
            _comes_on(s, lead)


def note_progress(s: Step, worker: Worker, copy: Copy) -> None:
    """Take note of how far an agent has come with what it brings."""
    group = s.group(worker)
    lead = s.model(worker).leads.get(group.zone) if group.seeds else None
    if lead is None or group.replica not in lead.agents or not is_behind(lead, copy.key):
        return
    if lead.bringing is None or copy.key > lead.bringing:
        lead.bringing, lead.marks = copy.key, {}
    if copy.key == lead.bringing and copy.done_bytes > lead.marks.get(worker.shard, 0):
        lead.marks[worker.shard] = copy.done_bytes
        _comes_on(s, lead)


def _comes_on(s: Step, lead: Lead) -> None:
    lead.since_s, lead.late = s.now, False


def check_leads(s: Step, model: ModelState) -> None:
    """Let zones go on without agents that have not come on for too long."""
    for zone, lead in model.leads.items():
        waits = not lead.late and is_behind(lead, model.high) and has_agent(s, model, lead)
        if waits and s.now >= lead.since_s + s.state.config.agent_within_s:
            lead.late = True
            s.touched.add(model.name)
            text = f"its seed agents ({', '.join(lead.agents)}) have not come on for {s.now - lead.since_s:.1f} s"
            s.log("warning", f"model {model.name!r}: zone {zone!r} goes on by itself, {text}")
