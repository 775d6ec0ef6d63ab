"""The tuner's choice against exhaustive search on a simulated clock, and against what others' formulas say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from everstep.errors import UsageError
from everstep.tune import references
from everstep.tune.choice import MAX_INTERVAL, choose
from everstep.tune.model import AUTO, MODES, RAW, Codec, Limits, Measured, Setting, cost_of
from everstep.tune.simulate import simulate

PLAIN = Measured(
    step_s=0.5, state_bytes=200e6, codecs=(Codec(name="auto", frame_bytes=67e6),), disk_bytes_s=1e9, sync_s=1e-3, base_s=0.4,
    load_s=0.2, replay_s=0.05, fold_s=0.04, fetch_s=0.1, ship_bytes_s=2e9, base_stall_s=0.1, live_stall_s=0.1,
    batch_stall_s=1e-4, failure_rate=1 / 86400, host_share=0.2,
)  # fmt: skip


def drawn(random: np.random.Generator) -> Measured:
    """Anything from a small model on a laptop to ten billion parameters, failures from twice an hour to once a month."""

    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    step_s, params, disk_bytes_s = between(0.02, 10), between(1e6, 1e10), between(1e8, 1e10)
    state_bytes, fold_s = 12 * params, step_s * between(0.01, 0.8)
    part, raw_bytes, choose_s = float(random.choice([1, 0.5, 0.01])), 4 * params, step_s * between(1e-3, 0.5)
    auto = Codec(
        name=AUTO, frame_bytes=part * raw_bytes, encode_s=choose_s, background_s=choose_s,
        sync=float(random.uniform(part, 1)), replay=float(random.uniform(0.3, 1)),
    )  # fmt: skip
    return Measured(
        step_s=step_s, state_bytes=state_bytes, keeps_log=bool(random.random() < 0.3),
        codecs=(auto, Codec(name=RAW, frame_bytes=raw_bytes, background_s=step_s * between(1e-3, 0.2))),
        disk_bytes_s=disk_bytes_s, sync_s=between(1e-4, 1), base_s=1.5 * state_bytes / disk_bytes_s,
        load_s=0.5 * state_bytes / disk_bytes_s, fold_s=fold_s, replay_s=fold_s * between(0.2, 1),
        fetch_s=state_bytes / 5e9, ship_bytes_s=5e9, elsewhere=bool(random.random() < 0.2),
        batch_stall_s=step_s * between(1e-4, 1) if random.random() < 0.7 else 0.0, base_stall_s=step_s * between(1e-2, 10),
        live_stall_s=state_bytes / 5e9, restart_s=between(1, 100),
        hook_s=step_s * between(1e-5, 1e-2), failure_rate=1 / between(1800, 30 * 86400),
        host_share=float(random.uniform(0.05, 0.6)),
        background_s=step_s * between(0.01, 0.5), contention=float(random.choice([0.0, 0.12, 1.0], p=[0.2, 0.7, 0.1])),
    )  # fmt: skip


def everything(measured: Measured) -> list[Setting]:
    """A grid over (F, B, codec, mode), without what a follower could not keep up with."""
    intervals = np.unique(np.round(np.geomspace(1, 1e5, 24)).astype(int)).tolist()
    batches = np.unique(np.round(np.geomspace(1, 1024, 12)).astype(int)).tolist()
    found = [
        Setting(mode="delta", base_interval=f, batch_steps=b, codec=c)
        for f in intervals for b in batches for c in (AUTO, RAW)
    ]  # fmt: skip
    found += [Setting(mode="shadow", base_interval=f, codec=c) for f in intervals for c in (AUTO, RAW)]
    found += [Setting(mode="snapshot", base_interval=f) for f in intervals]
    return [s for s in found if cost_of(measured, s).keeps_up >= 1]


@pytest.mark.parametrize(
    "num_settings", [20, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_the_choice_is_within_five_percent_of_the_best_of_exhaustive_search(num_settings):
    """Of the time that is wasted. The best of hundreds is the luckiest, too: if it seems better than that, both meet more
    failures, other ones, and then it counts. (Differences of a hundredth of a percent of all time never do.)"""
    random = np.random.default_rng(5)
    for seed in range(num_settings // 20):
        scenes = [drawn(random) for _ in range(20)]
        cases = []
        for m in scenes:
            modes = MODES if len(cases) % 2 else ("delta", "shadow")  # which "auto" chooses from; snapshots have no codec
            best = choose(m, modes=modes).setting
            cases.append([(m, s) for s in (best, *everything(m)) if s.mode in modes])
        goodput = simulate([case for each in cases for case in each], 1000, seed).goodput
        for scene, found in zip(cases, np.split(1 - goodput, np.cumsum([len(each) for each in cases])[:-1]), strict=True):
            if found[0] > 1.05 * found.min() + 1e-4:
                both = [scene[0], scene[int(found.argmin())]]
                chosen, best = 1 - simulate(both, 40_000, seed + 1_000_000).goodput
                assert chosen <= 1.05 * best + 1e-4, (both, chosen, best)


def test_the_model_predicts_what_the_simulation_measures():
    random = np.random.default_rng(6)
    scenes = [drawn(random) for _ in range(60)]
    cases = [(m, choose(m, modes=[mode]).setting) for m in scenes for mode in MODES]
    told = simulate(cases, 2000, 7)
    for (m, s), goodput in zip(cases, told.goodput, strict=True):
        cost = cost_of(m, s)
        if cost.keeps_up >= 1 and cost.goodput > 0.5:
            assert goodput == pytest.approx(cost.goodput, abs=0.01), (m, s)


def test_without_what_this_implementation_adds_the_choice_is_that_of_form_b():
    """No time to write, to sync, to make a base in the background; failures rare: the closed forms hold."""
    codecs = (Codec(name="auto", frame_bytes=0),)
    measured = replace(
        PLAIN, codecs=codecs, sync_s=0.0, base_s=0.0, fold_s=0.0, failure_rate=1e-6, batch_stall_s=0.002, base_stall_s=0.3
    )
    interval, batch = references.form_b(
        step_s=0.5, rate=1e-6, base_stall_s=0.3, batch_stall_s=0.002, replay_s=measured.replay_s
    )
    chosen = choose(measured)
    assert chosen.setting.base_interval == pytest.approx(interval, rel=0.1)
    assert chosen.setting.batch_steps == pytest.approx(batch, rel=0.1)
    waste = references.form_b_waste(
        chosen.setting.base_interval, chosen.setting.batch_steps, step_s=0.5, rate=1e-6, base_stall_s=0.3,
        batch_stall_s=0.002, load_s=measured.load_s, replay_s=measured.replay_s,
    )  # fmt: skip
    assert 1 - chosen.cost.goodput == pytest.approx(waste, rel=0.01)


def test_with_whole_states_only_the_choice_is_dalys():
    measured = replace(PLAIN, disk_bytes_s=math.inf, live_stall_s=30.0, failure_rate=1 / 7200)
    chosen = choose(measured, modes=["snapshot"])
    assert chosen.setting.base_interval * 0.5 == pytest.approx(references.daly(30.0, 7200), rel=0.05)
    assert references.daly(30.0, 7200) == pytest.approx(references.young(30.0, 7200), rel=0.05)
    between_s = chosen.setting.base_interval * 0.5
    total = references.daly_total(1.0, between_s, 30.0, measured.load_s, 7200)
    assert 1 / chosen.cost.goodput == pytest.approx(total, rel=1e-6)


def test_form_a_wastes_least_at_its_own_closed_forms():
    given = {"merge_s": 0.3, "full_bytes": 12e9, "bytes_s": 2e9, "mtbf_s": 3600.0}
    f, b = references.form_a(**given)
    best = references.form_a_waste(f, b, load_s=6.0, **given)
    for scale in (0.9, 1.1):
        assert references.form_a_waste(f * scale, b, load_s=6.0, **given) > best
        assert references.form_a_waste(f, b * scale, load_s=6.0, **given) > best


def test_a_snapshot_is_never_more_frequent_than_checkfreq_allows_without_waiting():
    """A write that takes ten steps: one every ten steps, or with PCcheck's two in flight one every five."""
    assert references.checkfreq(5.0, 0.0, 0.5) == 10
    assert references.pccheck(5.0, 2, 1.0, 0.5) == 5
    measured = replace(PLAIN, disk_bytes_s=PLAIN.state_bytes / 5.0, live_stall_s=0.0, failure_rate=1 / 600)
    assert choose(measured, modes=["snapshot"]).setting.base_interval == 10


def test_checkflow_snapshots_only_what_the_link_cannot_carry_in_time():
    assert references.checkflow(4e9, 10e9, 0.5, 0.6) == (0.0, 0.0, 1)
    assert references.checkflow(5.5e9, 10e9, 0.5, 0.6) == (0.5e9, 0.0, 1)
    snapshot, stall_s, interval = references.checkflow(15e9, 10e9, 0.5, 0.6)
    assert (snapshot, interval) == (10e9, 3) and stall_s == pytest.approx(0.9)


def test_limits_are_kept_and_named_in_the_reason():
    free = choose(PLAIN)
    assert free.cost.worst_recovery_s > 2.0 and free.broken == ()
    quick = choose(PLAIN, Limits(max_recovery_s=2.0))
    assert quick.cost.worst_recovery_s <= 2.0 and quick.setting.base_interval < free.setting.base_interval
    assert "max_recovery_s=2" in quick.reason
    light = choose(PLAIN, Limits(max_overhead=free.cost.overhead / 4))
    assert light.cost.overhead <= free.cost.overhead / 4 and light.setting.base_interval > free.setting.base_interval
    small = choose(PLAIN, Limits(max_bytes=1_000_000_000))
    assert small.cost.kept_bytes <= 1e9 and "max_bytes" in small.reason


def test_bases_are_given_up_before_the_byte_limit_is_broken():
    need = cost_of(PLAIN, Setting(base_interval=4, bases=1)).kept_bytes
    chosen = choose(PLAIN, Limits(max_bytes=int(need)), bases=3)
    assert chosen.setting.bases == 1 and chosen.broken == ()


def test_limits_that_nothing_keeps_give_the_nearest_and_say_so():
    chosen = choose(PLAIN, Limits(max_recovery_s=0.1))
    assert chosen.broken == ("max_recovery_s=0.1",) and "no setting keeps" in chosen.reason


def test_a_disk_that_cannot_sync_every_step_gets_batches():
    """A sync of two steps' time: every step would wait, four a sync do not."""
    chosen = choose(replace(PLAIN, sync_s=1.0, batch_stall_s=0.0))
    assert chosen.setting.batch_steps > 1 and chosen.cost.overhead < 0.01
    assert "the disk cannot sync every step in time" in chosen.reason
    assert choose(PLAIN, max_batch=1).setting.batch_steps == 1


def test_without_failures_nothing_is_done_for_recovery():
    chosen = choose(replace(PLAIN, failure_rate=0.0))
    assert chosen.setting.base_interval == MAX_INTERVAL and "without failures" in chosen.reason


def both(measured: Measured, *, saved: float, choose_s: float, **raw: float) -> Measured:
    """The same with a choice: lossless codecs, or frames as they are."""
    size = measured.codecs[0].frame_bytes
    auto = Codec(name=AUTO, frame_bytes=(1 - saved) * size, encode_s=choose_s, background_s=choose_s)
    return replace(measured, codecs=(auto, Codec(name=RAW, frame_bytes=size, **raw)), contention=0.12)


def test_lossless_codecs_are_tried_where_they_save_more_than_they_cost():
    """A tenth of a step for a hundredth of the bytes is no bargain; for what a slow disk cannot write in time, it is."""
    quick = choose(both(PLAIN, saved=0.01, choose_s=0.05))
    assert quick.setting.codec == RAW and "frames as they are: lossless codecs would save only 0.67 MB" in quick.reason
    assert choose(both(PLAIN, saved=0.5, choose_s=0.002, background_s=0.02)).setting.codec == AUTO
    slow = choose(both(replace(PLAIN, disk_bytes_s=1e8), saved=0.5, choose_s=0.05))
    assert slow.setting.codec == AUTO and slow.cost.overhead < 0.03
    assert "lossless codecs, which save 33.5 MB of the 67 MB of a frame for 50 ms of work" in slow.reason


def test_where_recoveries_are_frequent_fewer_bytes_to_read_are_worth_choosing_them():
    rare = both(replace(PLAIN, failure_rate=1e-7, base_stall_s=5.0), saved=0.5, choose_s=0.05, replay=3.0)
    assert choose(rare).setting.codec == RAW
    assert choose(replace(rare, failure_rate=1 / 120)).setting.codec == AUTO


def test_a_limit_on_bytes_speaks_for_lossless_codecs():
    measured = both(PLAIN, saved=0.5, choose_s=0.05)
    assert choose(measured).setting.codec == RAW
    need = cost_of(measured, Setting(base_interval=3, codec=AUTO, bases=1)).kept_bytes
    small = choose(measured, Limits(max_bytes=need), bases=1)
    assert small.setting.codec == AUTO and small.broken == () and "without max_bytes" in small.reason
    assert "frames as they are" in small.reason


def test_a_shadow_that_keeps_the_log_loses_no_step_with_its_host_and_takes_room_for_it():
    setting = Setting(mode="shadow", base_interval=100)
    plain, kept = (cost_of(replace(PLAIN, keeps_log=keeps), setting) for keeps in (False, True))
    assert kept.lost_s < plain.lost_s / 5 and kept.worst_recovery_s > plain.worst_recovery_s
    assert kept.kept_bytes > plain.kept_bytes + 200 * 67e6
    assert "is the log replayed" in choose(replace(PLAIN, keeps_log=True), modes=["shadow"]).reason


def test_a_shadow_is_chosen_where_processes_die_and_the_log_where_hosts_do():
    slow_replay = replace(PLAIN, replay_s=0.4, fold_s=0.2, failure_rate=1 / 600)
    assert choose(replace(slow_replay, host_share=0.0), modes=MODES).setting.mode == "shadow"
    lost_hosts = replace(slow_replay, host_share=1.0, base_stall_s=5.0, live_stall_s=5.0, replay_s=0.001)
    assert choose(lost_hosts, modes=MODES).setting.mode == "delta"
    assert choose(replace(slow_replay, fetch_s=math.inf), modes=MODES).setting.mode != "shadow"


def test_a_shadow_that_does_not_fit_into_memory_is_not_chosen():
    measured = replace(PLAIN, replay_s=0.4, fold_s=0.2, failure_rate=1 / 600, host_share=0.0)
    assert choose(replace(measured, memory_bytes=100e6), modes=["delta", "shadow"]).setting.mode == "delta"


@pytest.mark.parametrize(
    "field, value", [("step_s", 0.0), ("step_s", math.nan), ("failure_rate", -1.0), ("host_share", 1.5), ("codecs", ())]
)
def test_measurements_that_cannot_be_are_refused(field, value):
    with pytest.raises(UsageError, match="must be"):
        replace(PLAIN, **{field: value})


def test_limits_and_modes_that_make_no_sense_are_refused():
    for given in ({"max_overhead": 0.0}, {"max_recovery_s": -1.0}, {"max_bytes": 0}):
        with pytest.raises(UsageError):
            Limits(**given)
    with pytest.raises(UsageError, match="modes"):
        choose(PLAIN, modes=["sometimes"])
    with pytest.raises(UsageError, match="codec"):
        cost_of(PLAIN, Setting(codec="zip"))
