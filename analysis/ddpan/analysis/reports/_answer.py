"""The answer in plain words: what is slow, what it costs, what to do next. For readers who know DDP, but not ddpan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._changes import largest_step_time_change, step_time_clause
from ._sections import printable
from ._units import duration, hours, interval, percent, plural, rank_list

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary
    from ddpan.analysis.measures.verdict import Verdict

__all__ = ["PARTS", "answer"]

PARTS: Final = {
    "data": "data loading",
    "forward": "forward",
    "before_first_bucket": "from forward to the first gradient bucket",
    "backward": "backward from the first gradient bucket on",
    "optimizer": "optimizer",
    "other": "other code of the training loop",
    "wait": "waiting for the latest rank",
    "transfer": "gradient transfer after the backward",
}
"""Parts of a step in words."""

_WHERE: Final = {
    "data": "in loading {its} data",
    "forward": "in {its} forward pass",
    "backward": "in {its} backward pass",
    "optimizer": "in {its} optimizer step",
    "other": "in code of {its} training loop outside data loading, forward, backward and optimizer",
    None: "in a part of the step that the log does not show",
}

_WHEN: Final = {
    "persistent": "in nearly every step",
    "onset": "in every step since step {first}",
    "transient": "in steps {first} to {last}",
    "intermittent": "now and then, in {affected} of {steps},",
}

_UNDECIDED: Final = {
    "insufficient_data": "Cannot tell whether a rank is slow.",
    "rotating": "No single rank is slow.",
}

_NEXT: Final = {
    "data": "look at the input of {rank}: number of DataLoader workers, size of its samples, its storage and CPU load.",
    "forward": "compare the batches of {rank} (sizes, sequence lengths) and its device (clock, temperature, "
    "other processes) with those of another rank.",
    "backward": "compare the device of {rank} (clock, temperature, other processes) with another one, and look for "
    "work that only it does in the backward pass (hooks, longer sequences, checkpointing).",
    "optimizer": "look for what only {rank} does around optimizer.step(): clipping, swapping memory, saving.",
    "other": "look for what only {rank} does between steps: logging, evaluation, saving, garbage collection.",
    "collective": "look at the network: other jobs on its links, a failing cable or port, a fallback to a slower "
    "transport; NCCL_DEBUG=INFO shows what is used.",
    None: "record a few steps of {rank} and of another rank with torch.profiler and compare them.",
}

_NEXT_HOST: Final = (
    "compare {host} with another host: clocks and temperatures of its devices, CPU load, storage and network, software "
    "versions; or leave it out of the next run."
)

_LEVER: Final = {
    "transfer": "shorten the gradient transfer that no computation overlaps{bucket}: try another bucket_cap_mb, a "
    "compressing communication hook, or accumulating gradients under no_sync().",
    "wait": "the ranks wait for whichever is latest, not always the same one: look for uneven batches and noisy hosts.",
    "data": "all ranks wait for their data: more DataLoader workers, faster storage, or less work per sample.",
    "optimizer": "the optimizer takes much of the step on all ranks: try its fused=True or foreach=True.",
    "other": "code outside forward, backward and optimizer takes much of the step: logging, .item(), evaluation.",
}
_RISE: Final = (
    "look for what changed for all ranks at step {step}: longer batches, a stage of a training schedule, evaluation or "
    "saving, warm devices, other work on the same hosts."
)
_RISE_SHARE: Final = 0.05
"""Growth of the step time from which it is what to look at next."""

_LEVER_SHARE: Final = 0.1
_LEVER_SHARES: Final = {"transfer": 0.05}
"""Share of the step from which a part is worth a word: of those that are not here, the one above."""

_MOST_PARTS: Final = 4
_MOST_OTHERS: Final = 3


def answer(summary: Summary) -> tuple[str, ...]:
    """The answer, two to four lines, each a full sentence or two."""
    verdict = summary.stragglers.verdict
    if verdict.rank is not None:
        return _slow(summary, verdict)
    time = _time(summary, verdict)
    if verdict.cause == "collective":
        return tuple(filter(None, (_transfer(verdict), _gain(summary, verdict), f"Next: {_NEXT[verdict.cause]}")))
    if verdict.kind in _UNDECIDED:
        reason, _, advice = printable(verdict.reason).partition(" Next: ")
        cost = _gain(summary, verdict) or time
        return tuple(filter(None, (f"{_UNDECIDED[verdict.kind]} {reason}", cost, advice and f"Next: {advice}")))
    return tuple(filter(None, (_nobody(summary, verdict), time, _lever(summary, verdict))))


def _slow(summary: Summary, verdict: Verdict) -> tuple[str, ...]:
    many = len(verdict.ranks) > 1
    late = f"{_when(verdict)} {'they are' if many else 'it is'} {_delay(verdict)} later than the other ranks"
    first = f"{_who(summary, verdict)} slow {_where(verdict)}: {late}{_sure(verdict)}{_bucket(verdict)}."
    others = [
        f"{_short(one)} {_where(one)}, {_delay(one)} {_when(one).removesuffix(',')}"
        for one in summary.stragglers.named
        if one != verdict
    ]
    also = f"Also slow: {'; '.join(others[:_MOST_OTHERS])}{_more(len(others))}." if others else ""
    step = f"Next: {_next(verdict)}"
    return tuple(filter(None, (first, _cost(summary, verdict), " ".join(filter(None, (also, _all(summary)))), step)))


def _next(verdict: Verdict) -> str:
    if verdict.host is not None:
        return _NEXT_HOST.format(host=printable(verdict.host))
    return _NEXT[verdict.cause].format(rank=f"rank {verdict.rank}")


def _transfer(verdict: Verdict) -> str:
    begun = verdict.kind == "onset"
    when = f"since step {verdict.first_step}" if begun else f"in steps {verdict.first_step} to {verdict.last_step}"
    return (
        f"No rank is late, but the gradient transfer is slow for all of them {when}: each step takes "
        f"{_delay(verdict)} longer than {'before' if begun else 'the others'}{_sure(verdict)}."
    )


def _all(summary: Summary) -> str:
    """What all named ranks together cost: each waits for the others, so one put right alone may gain nothing."""
    now, without = summary.stragglers.verdict.step_time_ns, summary.stragglers.step_time_without_all_ns
    named = [one for one in summary.stragglers.named if one.module == summary.stragglers.verdict.module]
    if len(named) < 2 or not now or without is None:
        return ""
    return f"With all of these put right, a step would take {duration(without)}."


def _more(others: int) -> str:
    return f"; and {others - _MOST_OTHERS} more ranks" if others > _MOST_OTHERS else ""


def _who(summary: Summary, verdict: Verdict) -> str:
    if len(verdict.ranks) > 1:
        return f"All {len(verdict.ranks)} ranks of {_shared(verdict)} ({rank_list(verdict.ranks)}) are"
    hosts = [host for host, ranks in summary.hosts.items() if verdict.rank in ranks]
    return f"Rank {verdict.rank}" + (f" (on {printable(hosts[0])})" if hosts else "") + " is"


def _shared(verdict: Verdict) -> str:
    return (
        f"process group {printable(verdict.group or '')}" if verdict.host is None else f"host {printable(verdict.host)}"
    )


def _where(verdict: Verdict) -> str:
    return _WHERE[verdict.cause].format(its="their" if len(verdict.ranks) > 1 else "its")


def _short(verdict: Verdict) -> str:
    return _shared(verdict) if len(verdict.ranks) > 1 else f"rank {verdict.rank}"


def _bucket(verdict: Verdict) -> str:
    bucket = verdict.first_late_bucket
    if bucket is None:
        return ""
    if bucket == 0:
        return ", already before the first gradient bucket (the loss, or the last layers of the model)"
    first, *others = map(printable, verdict.first_late_parameters or ("",))
    more = f" and {plural(len(others), 'more parameter')}" if others else ""
    return f", from gradient bucket {bucket} on" + (f" ({first}{more})" if first else "")


def _when(verdict: Verdict) -> str:
    return _WHEN[verdict.kind].format(
        first=verdict.first_step,
        last=verdict.last_step,
        affected=verdict.affected_steps,
        steps=plural(verdict.steps, "step"),
    )


def _delay(verdict: Verdict) -> str:
    return duration(verdict.delay_ns)


def _sure(verdict: Verdict) -> str:
    ends = interval(verdict.delay_low_ns, verdict.delay_high_ns)
    return f" ({verdict.confidence or 0:.0%} confidence interval {ends})".replace("%", " %") if ends else ""


def _cost(summary: Summary, verdict: Verdict) -> str:
    gain = _gain(summary, verdict)
    who = "them" if len(verdict.ranks) > 1 else "it"
    return f"The other ranks wait for {who}: {gain[0].lower()}{gain[1:]}" if gain else ""


def _gain(summary: Summary, verdict: Verdict) -> str:
    now, without = verdict.step_time_ns, verdict.step_time_without_ns
    if not now or without is None or verdict.lost_seconds is None:
        return ""
    what = "these waits" if verdict.kind == "rotating" else "the delay"
    lost = duration(verdict.lost_seconds * 1e9)
    if verdict.lost_gpu_hours is not None and any(device.startswith("cuda") for device in summary.devices):
        lost += f" or {hours(verdict.lost_gpu_hours)} GPU-hours"
    return (
        f"A step takes {duration(now)} on average and would take {duration(without)} without {what}, so "
        f"{percent(1 - without / now)} of the time is lost: {lost} in {plural(verdict.steps, 'step')}."
    )


def _nobody(summary: Summary, verdict: Verdict) -> str:
    compared = summary.stragglers.ranks["left_out"].null_count()
    return (
        f"No straggler: none of {plural(compared, 'rank')} is regularly later than the others, in "
        f"{plural(verdict.steps, 'step')} of {duration(verdict.step_time_ns)} on average."
    )


def _time(summary: Summary, verdict: Verdict) -> str:
    parts = _shares(summary, verdict)
    if not parts:
        return ""
    large = [f"{percent(share)} {PARTS[part]}" for part, share in parts[:_MOST_PARTS]]
    return f"{_changed(summary, verdict)}Where the time of a step goes: {', '.join(large)}."


def _changed(summary: Summary, verdict: Verdict) -> str:
    change = largest_step_time_change(summary.changes, verdict.module)
    if change is None:
        return ""
    alike = ", for all ranks alike" if verdict.kind == "none" else ""
    clause = step_time_clause(change)
    return f"{clause[0].upper()}{clause[1:]}{alike}. "


def _lever(summary: Summary, verdict: Verdict) -> str:
    change = largest_step_time_change(summary.changes, verdict.module)
    if change is not None and change["change_ns"] > _RISE_SHARE * change["before_ns"]:
        return f"Next: {_RISE.format(step=change['step'])}"
    for part, share in _shares(summary, verdict):
        if part in _LEVER and share >= _LEVER_SHARES.get(part, _LEVER_SHARE):
            return f"Next: {_LEVER[part].format(bucket=_exposed_bucket(summary, verdict))}"
    return "Next: there is little to gain between the ranks; faster forward and backward computation is what helps."


def _exposed_bucket(summary: Summary, verdict: Verdict) -> str:
    """The bucket that is exposed most, if that is worth a word."""
    buckets = summary.overlap.buckets.filter(module=verdict.module).drop_nulls("exposed_share")
    if buckets.is_empty():
        return ""
    row = buckets.sort("exposed_share", descending=True).row(0, named=True)
    if row["exposed_share"] < _LEVER_SHARES["transfer"]:
        return ""
    last = ", the last to be ready," if row["bucket"] == buckets["bucket"].max() else ""
    return f" (gradient bucket {row['bucket']}{last} alone takes {percent(row['exposed_share'])} of the step)"


def _shares(summary: Summary, verdict: Verdict) -> list[tuple[str, float]]:
    """Parts of a step of the module that is judged, and their shares, the largest first."""
    split = summary.step_split.filter(module=verdict.module) if verdict.module is not None else summary.step_split
    rows = split.drop_nulls("share").sort("share", descending=True).select("part", "share")
    return list(rows.unique("part", keep="first", maintain_order=True).iter_rows())
