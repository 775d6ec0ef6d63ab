"""Averages of what a run measures, and a tuner that changes its mind seldom."""

from dataclasses import replace

import numpy as np
import pytest

from everstep.tune.averages import (
    CONTENTION,
    INTERFERENCE,
    PRIOR_S,
    Averages,
    BaseMade,
    Counters,
    Spent,
    contention_of,
    estimated_rate,
)
from everstep.tune.choice import choose, excess_of
from everstep.tune.model import AUTO, RAW, Limits, Measured, Setting, cost_of
from everstep.tune.tuner import LARGEST_CHANGE, Tuner, is_worth, keeps_better


class Training:
    """A run whose numbers are made up: it feeds averages as a keeper does."""

    def __init__(self, *, step_s=0.1, frame_bytes=1_000_000, sync_s=0.001, write_s=0.002, base_stall_s=0.2, noise=0.0):
        self.averages = Averages()
        self.hook_s = self.sync_wait_s = 0.0
        self._costs = (step_s, frame_bytes, sync_s, write_s)
        self.base_stall_s = base_stall_s
        self._random, self._noise = np.random.default_rng(0), noise
        self.now = Counters(step=0, trained_s=0.0, waited_s=0.0, hook_s=0.0, log_bytes=0, write_s=0.0, sync_s=0.0)

    def train(self, steps, batch=1, extra_s=0.0):
        step_s, frame_bytes, sync_s, write_s = self._costs
        waits_s = steps * (max(write_s + sync_s / batch - step_s, 0.0) + self.sync_wait_s / batch)
        n = self.now
        took_s = steps * (step_s * (1 + self._noise * self._random.normal()) + self.hook_s) + waits_s + extra_s
        self.now = Counters(
            step=n.step + steps, log_bytes=n.log_bytes + steps * frame_bytes, waited_s=n.waited_s + waits_s,
            hook_s=n.hook_s + steps * self.hook_s, trained_s=n.trained_s + took_s,
            write_s=n.write_s + steps * (write_s + sync_s / batch), sync_s=n.sync_s + steps * sync_s / batch,
        )  # fmt: skip
        return n, self.now

    def bases(self, count, setting):
        for _ in range(count):
            self.averages.quiet(*self.train(setting.base_interval, setting.batch_steps), setting.batch_steps)
            steps = setting.base_interval
            fold_s = 0.01 * steps
            made = BaseMade(num_bytes=3_000_000, write_s=0.05, num_folded=steps, fold_s=fold_s, fold_cpu_s=fold_s)
            self.averages.base(*self.train(5, setting.batch_steps, self.base_stall_s), made)

    def measured(self, rate=1 / 3600) -> Measured:
        return self.averages.measured(failure_rate=rate, memory_bytes=1e9, segment_bytes=0, copy_bytes_s=1e9)


def test_averages_find_what_steps_and_bases_cost():
    training = Training()
    training.hook_s = 0.002
    training.bases(4, Setting(base_interval=50))
    found = training.measured()
    assert found.step_s == pytest.approx(0.1) and found.hook_s == pytest.approx(0.002)
    assert found.base_stall_s == pytest.approx(0.2)
    assert found.codecs[0].frame_bytes == 1_000_000
    assert found.disk_bytes_s == pytest.approx(1_000_000 / 0.002)
    assert found.sync_s == pytest.approx(0.001)
    assert (found.fold_s, found.base_s, found.state_bytes) == (pytest.approx(0.01), pytest.approx(0.05), 3_000_000)


def test_a_writer_that_cannot_keep_up_is_not_counted_twice():
    training = Training(sync_s=0.15)
    training.bases(4, Setting())
    found = training.measured()
    assert found.step_s == pytest.approx(0.1) and found.batch_stall_s == pytest.approx(0.0, abs=1e-9)
    assert cost_of(found, Setting()).overhead == pytest.approx((0.152 - 0.1) / 0.1 + 0.2 / 20, rel=0.01)


def test_what_a_sync_costs_is_found_whatever_the_batch_is():
    """Training waits 2 ms for every sync of a writer that keeps up."""
    for batch in (1, 4):
        training = Training()
        training.sync_wait_s = 0.002
        training.bases(3, Setting(batch_steps=batch))
        found = training.measured()
        assert found.batch_stall_s == pytest.approx(0.002) and found.sync_s == pytest.approx(0.001)
        assert found.step_s == pytest.approx(0.1)


def test_noise_does_not_make_bases_free():
    training = Training(base_stall_s=-0.5)
    training.bases(3, Setting())
    assert training.measured().base_stall_s == pytest.approx(INTERFERENCE * 0.05)


def test_a_recovery_corrects_what_is_expected_of_the_next():
    training = Training()
    training.bases(3, Setting())
    before = training.measured()
    training.averages.recovered(0.5 * (0.05 + 100 * 0.01), 100)
    after = training.measured()
    assert after.load_s + 100 * after.replay_s == pytest.approx(0.5 * (0.05 + 100 * 0.01))
    assert after.replay_s == pytest.approx(before.replay_s / 2, rel=0.1)
    assert after.load_s == pytest.approx(before.load_s, rel=0.1)


def test_a_short_recovery_tells_of_loading_and_little_of_replaying():
    training = Training()
    training.bases(3, Setting())
    training.averages.recovered(0.5, 1)
    after = training.measured()
    assert after.load_s + after.replay_s == pytest.approx(0.5)
    assert after.load_s > 0.45 and after.replay_s < 0.03


def test_a_recovery_far_quicker_than_expected_leaves_nothing_below_zero():
    training = Training()
    training.bases(3, Setting())
    training.averages.recovered(0.0, 2)
    after = training.measured()
    assert after.load_s > 0 and after.replay_s > 0


def test_replaying_is_expected_to_take_what_folding_takes_on_all_cores():
    averages = Averages()
    made = {"num_bytes": 1000, "write_s": 0.1, "num_folded": 10, "fold_s": 2.0}
    begun = Counters(step=0, trained_s=0.0, waited_s=0.0, hook_s=0.0, log_bytes=0, write_s=0.0, sync_s=0.0)
    averages.base(begun, begun, BaseMade(**made, fold_cpu_s=1.0, num_cores=4))
    given = {"failure_rate": 0.0, "memory_bytes": 1e9, "segment_bytes": 0, "copy_bytes_s": 1e9}
    assert averages.measured(**given).replay_s == pytest.approx(0.025)
    assert averages.measured(**given).fold_s == pytest.approx(0.2)


def test_averages_go_on_from_what_was_kept():
    training = Training()
    training.bases(3, Setting())
    again = Averages(training.averages.kept())
    assert again.kept() == training.averages.kept() and again.ready()


def test_nothing_is_decided_before_there_are_measurements():
    training = Training()
    tuner = Tuner(Setting(), Limits())
    training.bases(1, Setting())
    assert tuner.at_base(50, training.averages, training.measured()) is None


def test_the_tuner_goes_to_the_best_setting_in_a_few_bases_and_stays_there():
    training = Training(noise=0.02)
    tuner = Tuner(Setting(base_interval=2), Limits())
    training.bases(2, tuner.setting)
    changes = []
    for _ in range(30):
        before = tuner.setting.base_interval
        training.bases(1, tuner.setting)
        verdict = tuner.at_base(training.now.step, training.averages, training.measured())
        if verdict.changed:
            changes.append(verdict)
            assert verdict.decision.setting.base_interval <= LARGEST_CHANGE * before
            assert "saves" in verdict.decision.reason
        else:
            assert "as before" in verdict.decision.reason
    assert 1 <= len(changes) <= 6
    best = np.sqrt(2 * 0.2 / (1 / 3600 * 0.01 * 0.1))
    assert 0.4 * best < tuner.setting.base_interval < 2.5 * best


def test_a_gain_that_is_not_worth_it_changes_nothing():
    training = Training()
    setting = Setting(base_interval=1500)
    training.bases(3, setting)
    tuner = Tuner(setting, Limits())
    verdict = tuner.at_base(training.now.step, training.averages, training.measured())
    assert not verdict.changed and tuner.setting == setting and "would save only" in verdict.decision.reason


def test_where_nearly_all_is_wasted_twice_as_much_that_lasts_is_worth_a_change():
    assert is_worth(0.06, 0.03) and not is_worth(0.032, 0.03)
    assert is_worth(0.976, 0.97) and not is_worth(0.972, 0.97)
    assert not is_worth(0.99995, 0.9999)


def test_a_limit_that_is_not_kept_changes_the_setting_at_once():
    training = Training()
    setting = Setting(base_interval=1000)
    training.bases(3, setting)
    tuner = Tuner(setting, Limits(max_recovery_s=3.0))
    verdict = tuner.at_base(training.now.step, training.averages, training.measured(1e-6))
    assert verdict.changed and verdict.decision.cost.worst_recovery_s <= 4.0 and "limits" in verdict.decision.reason
    tuner.at_base(training.now.step, training.averages, training.measured(1e-6))
    assert cost_of(training.measured(1e-6), tuner.setting).worst_recovery_s <= 3.0


def test_a_slow_disk_gets_larger_batches_and_only_if_they_may_be_changed():
    for max_batch in (1, 64):
        training = Training(sync_s=0.4)
        tuner = Tuner(Setting(), Limits(), max_batch=max_batch)
        for _ in range(6):
            training.bases(1, tuner.setting)
            tuner.at_base(training.now.step, training.averages, training.measured())
        assert (tuner.setting.batch_steps > 3) == (max_batch > 1)


def test_the_failure_rate_begins_with_one_a_day_and_follows_what_happens():
    assert estimated_rate(0, 0.0) == 1 / PRIOR_S
    assert estimated_rate(0, 9 * PRIOR_S) == pytest.approx(0.1 / PRIOR_S)
    assert estimated_rate(100, PRIOR_S) == pytest.approx(50.5 / PRIOR_S)


def test_background_work_costs_training_a_part_of_its_processor_time_and_all_of_it_where_no_core_is_left():
    training = Training()
    training.bases(3, Setting())
    averages = Averages({**training.averages.kept(), "background_s": (0.02, 3), "other_cpu_s": (0.02, 3)})
    given = {"failure_rate": 0.0, "memory_bytes": 1e9, "segment_bytes": 0, "copy_bytes_s": 1e9}
    free, crowded = (averages.measured(**given, contention=contention_of(n, 2)) for n in (1, 2))
    for found, part in ((free, CONTENTION), (crowded, 1.0)):
        assert found.step_s == pytest.approx(0.1 - part * 0.02)  # a follower folds only while a base is made
        assert found.base_stall_s == pytest.approx(max(0.2 - part * 200 * 0.01, INTERFERENCE * 0.05))
        bases = found.base_stall_s / 1000
        here = part * (0.02 + found.fold_s)
        for mode, elsewhere, lost_s in (("delta", False, here), ("shadow", False, here), ("shadow", True, part * 0.02)):
            cost = cost_of(replace(found, elsewhere=elsewhere), Setting(mode=mode, base_interval=1000))
            assert cost.overhead == pytest.approx((lost_s + bases) / found.step_s)


class Coding:
    """A run with frames of 100 MB of which lossless codecs save a part, on a disk that takes so long for a byte."""

    def __init__(self, *, saved=0.5, choose_s=0.02, byte_s=1e-9, sync_s=0.0, step_s=0.5):
        self.averages = Averages()
        self.saved, self.choose_s, self.byte_s, self.sync_s, self.step_s = saved, choose_s, byte_s, sync_s, step_s
        self.step = 0
        self.took = dict.fromkeys(("trained_s", "waited_s", "hook_s", "log_bytes", "write_s", "sync_s", "background_s"), 0.0)
        self.spent = Spent()

    def train(self, steps, setting):
        begun = self.counters()
        tried = steps if setting.codec == AUTO else min(steps, 2)
        saved_bytes = tried * self.saved * 100e6
        put_bytes = steps * 100e6 - saved_bytes
        choose_s, put_s = tried * self.choose_s, put_bytes * self.byte_s
        sync_s = self.sync_s * put_bytes / 50e6  # as long as its bytes are many
        write_s = choose_s + put_s + 0.01 * steps
        self.step += steps
        waits_s = max(write_s + sync_s - steps * self.step_s, 0.0)
        for name, value in (
            ("trained_s", steps * self.step_s + waits_s), ("waited_s", waits_s), ("log_bytes", put_bytes),
            ("write_s", write_s + sync_s), ("sync_s", sync_s),
            ("background_s", choose_s / 2 + put_bytes * 0.2e-9 + 0.02 * steps),
        ):  # fmt: skip
            self.took[name] += value
        s = self.spent
        self.spent = Spent(
            tried_frames=s.tried_frames + tried, choose_s=s.choose_s + choose_s, put_s=s.put_s + put_s,
            choose_cpu_s=s.choose_cpu_s + choose_s / 2,
            saved_bytes=s.saved_bytes + int(saved_bytes), put_bytes=s.put_bytes + int(put_bytes),
            put_cpu_s=s.put_cpu_s + put_bytes * 0.2e-9,
        )  # fmt: skip
        return begun, self.counters()

    def counters(self):
        return Counters(step=self.step, spent=self.spent, **self.took)

    def base(self, setting, *, in_memory=False):
        self.averages.quiet(*self.train(200, setting), 1, in_memory=in_memory)
        made = BaseMade(num_bytes=300_000_000, write_s=0.3, num_folded=200, fold_s=10.0, fold_cpu_s=10.0)
        self.averages.base(*self.train(2, setting), made)

    def measured(self, setting, **more):
        given = {"failure_rate": 1e-5, "memory_bytes": 1e12, "segment_bytes": 0, "copy_bytes_s": 1e9, "contention": 0.12}
        return self.averages.measured(**{**given, **more}, setting=setting)


def test_what_codecs_save_and_cost_is_found_whichever_setting_is_in_force():
    found = {}
    for name in (AUTO, RAW):
        coding, setting = Coding(sync_s=0.004), Setting(codec=name)
        for _ in range(3):
            coding.base(setting)
        found[name] = m = coding.measured(setting)
        auto, raw = m.codec(AUTO), m.codec(RAW)
        assert auto.frame_bytes == pytest.approx(50e6, rel=0.02) and raw.frame_bytes == pytest.approx(100e6, rel=0.02)
        assert auto.encode_s - raw.encode_s == pytest.approx(0.02) and raw.encode_s == pytest.approx(0.01)
        assert m.disk_bytes_s == pytest.approx(1e9)
        assert m.background_s == pytest.approx(0.02)
        assert auto.background_s == pytest.approx(0.02 / 2 + 0.01, rel=0.02)
        assert raw.background_s == pytest.approx(0.02, rel=0.02)
        assert auto.sync * m.sync_s == pytest.approx(0.004, rel=0.02)
        assert raw.sync * m.sync_s == pytest.approx(0.008, rel=0.02)
        assert m.codec(name).replay == m.codec(name).sync == 1.0
    for setting in (Setting(codec=AUTO), Setting(codec=RAW)):
        costs = [cost_of(m, setting) for m in found.values()]
        assert costs[0].overhead == pytest.approx(costs[1].overhead, rel=0.03)
        assert costs[0].goodput == pytest.approx(costs[1].goodput, rel=1e-3)


def test_the_tuner_gives_up_codecs_that_cost_more_than_they_save_and_takes_them_up_when_that_changes():
    coding = Coding(saved=0.01, choose_s=0.15)
    tuner = Tuner(Setting(), Limits())
    changes = []
    for number in range(24):
        if number == 12:  # gradients have become sparse, and the disk slow
            coding.saved, coding.byte_s = 0.9, 8e-9
        before = tuner.setting.codec
        coding.base(tuner.setting)
        verdict = tuner.at_base(coding.step, coding.averages, coding.measured(tuner.setting))
        if verdict is not None and tuner.setting.codec != before:
            changes.append((number, tuner.setting.codec))
            assert verdict.changed and ("frames as they are" in verdict.decision.reason) == (tuner.setting.codec == RAW)
    assert [codec for _, codec in changes] == [RAW, AUTO] and changes[0][0] < 4 and 12 <= changes[1][0] < 18


def test_codecs_between_which_there_is_little_to_choose_are_not_changed():
    """The difference is some hundredths of a percent of a step, and noise makes now this and now that the better one."""
    random, tuner = np.random.default_rng(0), Tuner(Setting(), Limits())
    coding = Coding()
    for _ in range(40):
        coding.choose_s = 0.01 * (1 + 0.5 * random.normal())
        coding.base(tuner.setting)
        tuner.at_base(coding.step, coding.averages, coding.measured(tuner.setting))
        assert tuner.setting.codec == AUTO


def test_without_pieces_that_a_codec_could_take_there_is_no_difference():
    training = Training()
    training.bases(3, Setting())
    found = training.measured()
    auto, raw = found.codecs
    assert (auto.name, raw.name) == (AUTO, RAW) and replace(raw, name=AUTO) == auto


def test_a_log_in_memory_tells_of_the_way_to_a_shadow_and_nothing_of_disks():
    coding, setting = Coding(byte_s=2e-10), Setting(mode="shadow")
    for _ in range(3):
        coding.base(setting, in_memory=True)
    found = coding.measured(setting)
    assert found.ship_bytes_s == pytest.approx(5e9)
    assert found.disk_bytes_s == pytest.approx(300e6 / 0.3)  # what bases told
    assert found.fetch_s == pytest.approx(0.3)
    assert coding.averages.count("write_s") == coding.averages.count("sync_s") == 0
    coding.averages.fetched(0.05)
    assert coding.measured(setting).fetch_s == pytest.approx(0.05)


def test_a_shadow_folds_all_the_time_and_a_lazy_follower_while_it_makes_a_base():
    coding = Coding()
    for _ in range(3):
        coding.base(Setting())
    averages = Averages({**coding.averages.kept(), "base_stall_s": (3.0, 3)})
    given = {"failure_rate": 0.0, "memory_bytes": 1e12, "segment_bytes": 0, "copy_bytes_s": 1e9, "contention": 0.12}
    lazy, eager = (averages.measured(**given, setting=Setting(mode=mode)) for mode in ("delta", "shadow"))
    assert lazy.step_s - eager.step_s == pytest.approx(0.12 * 0.05)
    assert eager.base_stall_s - lazy.base_stall_s == pytest.approx(0.12 * 0.05 * 200)


def test_what_a_setting_on_the_way_breaks_is_told():
    training = Training()
    training.bases(3, Setting(base_interval=1000))
    tuner = Tuner(Setting(base_interval=1000), Limits(max_recovery_s=2.0))
    first = tuner.at_base(training.now.step, training.averages, training.measured(1e-6))
    assert first.decision.cost.worst_recovery_s > 2.0 and first.decision.broken == ("max_recovery_s=2",)
    second = tuner.at_base(training.now.step, training.averages, training.measured(1e-6))
    assert second.decision.cost.worst_recovery_s <= 2.0 and second.decision.broken == ()


def test_where_no_setting_keeps_a_limit_noise_changes_nothing():
    """Base intervals between which the nearest changes with every measurement."""
    training = Training()
    training.bases(3, Setting())
    measured = training.measured()
    limits = Limits(max_overhead=1e-6, max_recovery_s=1e-3)
    tuner = Tuner(Setting(), limits)
    for _ in range(8):
        tuner.at_base(0, training.averages, measured)
    random, changes = np.random.default_rng(0), 0
    for _ in range(50):
        noisy = replace(
            measured, base_stall_s=measured.base_stall_s * (1 + 0.03 * random.normal()),
            replay_s=measured.replay_s * (1 + 0.03 * random.normal()),
        )  # fmt: skip
        verdict = tuner.at_base(0, training.averages, noisy)
        changes += verdict.changed
        assert verdict.decision.broken
    assert changes == 0


def test_the_tuner_goes_by_what_the_choice_goes_by():
    """One limit broken a lot is worse than two broken less, though these are more in all."""
    assert keeps_better((0.0, 2.0), (0.0, 3.0)) and not keeps_better((0.0, 2.0), (0.0, 2.1))
    assert keeps_better((0.0, 5.0), (0.1, 0.0)) and not keeps_better((0.1, 0.0), (0.0, 5.0))
    assert keeps_better((0.0, 0.0), (0.0, 1e-9)) and not keeps_better((0.0, 0.0), (0.0, 0.0))
    assert keeps_better((0.99, 0.0), (1.0, 3.0))
    training = Training()
    training.bases(3, Setting())
    measured, limits = training.measured(), Limits(max_overhead=1e-6, max_recovery_s=1e-3)
    best = choose(measured, limits).setting
    for interval in (1, 10, 100, 1000, 10_000):
        other = replace(best, base_interval=interval)
        assert excess_of(measured, limits, best) <= excess_of(measured, limits, other)
