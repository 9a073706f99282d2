"""Mutants of the core: masks, streams, sampling, selection, clipping, noise, and the step that composes them."""

from __future__ import annotations

from tests.mutants.values import Mutant

CLIPPING, NOISE, MECHANISM, MASKS = "dp/clipping.py", "dp/noise.py", "dp/mechanism.py", "dp/masks.py"
SAMPLING, SELECTION, RANDOMNESS, DISCRETE = "dp/sampling.py", "dp/selection.py", "dp/randomness.py", "dp/discrete.py"


def of(file: str, *tests: str) -> list[str]:
    """Names of tests of one file."""
    return [f"tests/{file}.py::{test}" for test in tests]


REPLAY = of("test_record_replay", "test_at_the_last_coordinate_of_a_layer", "test_private_steps_leak_nothing")
ORACLE = of("dp/test_clipping", "test_equals_the_oracle", "test_neighbours_differ_by_at_most_the_clip")

UNITS = "    units = participants(key, step, settings.num_units, settings.sampling_rate)\n"
TOTAL = "    total = reduce(_sum(settings, model, loss, read(units), masks, engine))\n"
SELECT = "    masks = select(settings.layers, settings.drop, settings.drop_rate, settings.pruned, weights, key, step)\n"
RAW = "clipping.clipped_sum(engine, model, loss, read(units), settings.pruned, settings.clip).tensors"
BY_SIZE_OF = 'select(settings.layers, "magnitude", settings.drop_rate, settings.pruned, Released({}, ""), key, step)'
NOISED = '    noised = add_noise(total, settings.noise_multiplier, masks, key, "train", step)\n'
UNIT_LOOP = "    for inputs, targets in rows.of_each_unit():\n        losses"
ADDED = "                total[name] += tensor * factor.to(tensor.device)\n"
DRAWN = "(noise_multiplier * total.sensitivity) * drawn"
PLACE = 'place = ("noise", purpose, step, name)'
RELEASED = 'return Released(restrict(noised, masks), f"Gaussian'
SNIP = '    return add_noise(total, settings.noise_multiplier, settings.pruned, key, "dp-snip", 0).over(settings.batch_size)\n'

_masks = [
    Mutant(
        "A1", "the mask is the top of this step's own gradients",
        [(MECHANISM, TOTAL, f"    masks = {BY_SIZE_OF.format(RAW)}\n{TOTAL}")], REPLAY, sample=True,
    ),
    Mutant(
        "A2", "the mask is the top of the clipped sum, before the noise",
        [(MECHANISM, TOTAL, TOTAL + f"    masks = {BY_SIZE_OF.format('total.tensors')}\n")], REPLAY,
    ),
    Mutant(
        "A3", "the magnitude mask reads a copy of the weights that saw no noise",
        [
            (MECHANISM, "    weights = public(participating(model), ", "    weights = public(_SHADOW if step else participating(model), "),
            (MECHANISM, TOTAL, TOTAL + "    _SHADOW.update({n: p.detach() - total.tensors[n].to(p.dtype) for n, p in participating(model).items()})\n"),
            (MECHANISM, "Read = Callable", "_SHADOW: dict = {}\nRead = Callable"),
        ], of("test_record_replay", "test_magnitudes_are_those_of_released_weights"),
    ),
    Mutant(
        "A15", "every micro-batch has a mask of its own",
        [(CLIPPING, "    for rows in batch:\n        for name, tensor in engine(model, loss, rows, masks, clip)",
          "    for part, rows in enumerate(batch):\n        moved = {n: m.roll(part) for n, m in masks.items()}\n"
          "        for name, tensor in engine(model, loss, rows, moved, clip)")],
        of("dp/test_mechanism", "test_masks_of_a_step_are_those_of_the_clipping_and_the_noise"), sample=True,
    ),
    Mutant(
        "A16", "every example has a mask of its own",
        [(CLIPPING, UNIT_LOOP, UNIT_LOOP.replace("        losses", "        masks = {n: m.roll(1) for n, m in masks.items()}\n        losses"))],
        of("dp/test_clipping", "test_nothing_off_the_masks"),
    ),
    Mutant(
        "A17", "the mask's stream depends on how many rows were read",
        [(MECHANISM, SELECT + UNITS, UNITS + SELECT.replace("key, step)", "key, step + 100 * sum(len(r.unit) for r in read(units)))"))],
        REPLAY,
    ),
    Mutant(
        "A18", "a layer's last coordinate is chosen by the raw gradient",
        [(MECHANISM, TOTAL, f"    raw = {RAW}\n    masks = {{n: raw[n].abs() == raw[n].abs().max() if m.shape == raw[n].shape and m.sum() == 1 else m "
          f"for n, m in masks.items()}}\n{TOTAL}")],
        of("test_record_replay", "test_at_the_last_coordinate_of_a_layer"),
    ),
    Mutant(
        "A19", "dropped gradients are kept and added at a later step",
        [
            (MECHANISM, TOTAL, TOTAL + f"    raw = {RAW}\n    for n, t in total.tensors.items() if total.grid is None else ():\n"
             "        kept = _LEFT.get(n, 0) * (step > 0) + raw[n] - t\n        now = (t != 0) * kept\n        t += now\n        _LEFT[n] = kept - now\n"),
            (MECHANISM, "Read = Callable", "_LEFT: dict = {}\nRead = Callable"),
        ], REPLAY,
    ),
    Mutant(
        "A20a", "a rate is taken as the fraction kept",
        [(MASKS, "math.floor(rate * n + 0.5)", "math.floor((1 - rate) * n + 0.5)")], of("dp/test_masks", "test_counts_by_hand"), sample=True,
    ),
    Mutant(
        "A20b", "a mask lies transposed on its weight",
        [(MASKS, "        return chosen.reshape(scores.shape)\n", "        return chosen.reshape(scores.shape[::-1]).permute(*range(scores.ndim - 1, -1, -1))\n")],
        of("dp/test_masks", "test_a_mask_lies_as_its_weight_lies"),
    ),
    Mutant("A20c", "counts are rounded down", [(MASKS, "rate * n + 0.5", "rate * n")], of("dp/test_masks", "test_counts_are_exact")),
    Mutant("A20d", "a layer may lose its last coordinate", [(MASKS, "max(n - 1, 0)", "n")], of("dp/test_masks", "test_counts_by_hand")),
    Mutant("A20e", "ties keep more than the count", [(MASKS, "chosen = ranked > threshold\n    missing", "chosen = ranked >= threshold\n    missing")],
           of("dp/test_masks", "test_keep_top_keeps_the_highest_and_exactly_so_many")),
    Mutant("A20f", "a score that is NaN ranks first", [(MASKS, "nan=-math.inf", "nan=math.inf")],
           of("dp/test_masks", "test_keep_top_keeps_the_highest_and_exactly_so_many")),
    Mutant("A20g", "magnitude ranks by sign", [(SELECTION, "else weight.abs()", "else weight")], of("dp/test_selection", "test_magnitude_keeps_large_weights")),
    Mutant("A20h", "the rate is taken of all weights, not of what pruning left", [(SELECTION, "kept_count(int(eligible.sum()), rate)", "min(kept_count(eligible.numel(), rate), int(eligible.sum()))")],
           of("dp/test_selection", "test_counts_are_exact_on_what_pruning_left")),
    Mutant("A20i", "pruned weights come back", [(SELECTION, "    return combine(pruned, chosen)", "    return chosen"),
                                                (SELECTION, "eligible = alive.flatten(1).any(dim=1) if layer.by_filter else alive", "eligible = torch.ones_like(alive.flatten(1).any(dim=1) if layer.by_filter else alive)")],
           of("dp/test_selection", "test_counts_are_exact_on_what_pruning_left")),
    Mutant("A20j", "the random subset is the same at every step", [(SELECTION, '"selection", self.step, self.layer', '"selection", self.layer')],
           of("dp/test_selection", "test_random_is_uniform_and_fresh_at_every_step_and_layer")),
    Mutant("A20k", "layers of one shape share their random subset", [(SELECTION, '"selection", self.step, self.layer', '"selection", self.step')],
           of("dp/test_selection", "test_random_is_uniform_and_fresh_at_every_step_and_layer")),
    Mutant("A20l", "the classifier is masked by whole classes", [(MASKS, "and known and n != last_linear", "and known")],
           of("dp/test_masks", "test_what_can_be_masked")),
    Mutant("A20m", "frozen parameters take part", [(MASKS, "model.named_parameters() if p.requires_grad}", "model.named_parameters()}")],
           of("dp/test_masks", "test_frozen_tied_and_parametrised_weights")),
]  # fmt: skip

_clipping = [
    Mutant("B1", "the batch is averaged before clipping", [
        (CLIPPING, UNIT_LOOP, "    for inputs, targets in [(rows.inputs, rows.targets)] if rows.units else []:\n        losses"),
        (CLIPPING, ADDED, ADDED.replace("factor", "rows.units * factor")),
    ], ORACLE),
    Mutant("B2", "the views of an image are clipped and summed one by one",
           [(CLIPPING, "yield self.part(start, start + count)", "yield from (self.part(i, i + 1) for i in range(start, start + count))")],
           of("dp/test_clipping", "test_views_are_averaged_before_clipping", "test_neighbours_differ_by_at_most_the_clip")),
    Mutant("B3a", "the norm leaves out biases and gains", [(CLIPPING, "for t in gradient.values()]", "for t in gradient.values() if t.ndim > 1]")],
           of("dp/test_clipping", "test_neighbours_differ_by_at_most_the_clip"), sample=True),
    Mutant("B3b", "the norm is taken before the mask", [(CLIPPING, "clip_factor(own, clip) if", "clip_factor({n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients)}, clip) if")],
           ORACLE),
    Mutant("B4", "every tensor is clipped to C on its own", [(CLIPPING, ADDED, ADDED.replace("factor.to(tensor.device)", "clip_factor({name: tensor}, clip)"))],
           of("dp/test_clipping", "test_neighbours_differ_by_at_most_the_clip")),
    Mutant("B7a", "gradients are not restricted to the mask", [(CLIPPING, "own = restrict({n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients, strict=True)}, masks)",
                                                                "own = {n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients, strict=True)}")],
           of("dp/test_clipping", "test_nothing_off_the_masks")),
    Mutant("B7b", "where there is no noise the sum shows through", [
        (CLIPPING, "own = restrict({n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients, strict=True)}, masks)",
         "own = {n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients, strict=True)}"),
        (NOISE, RELEASED, 'return Released({n: torch.where(t == 0, total.tensors[n].to(t.dtype), t) for n, t in restrict(noised, masks).items()}, f"Gaussian'),
    ], of("dp/test_mechanism", "test_dropped_coordinates_get_exactly_nothing")),
    Mutant("B10b", "only the last micro-batch counts", [(CLIPPING, "engine(model, loss, rows, masks, clip).items():\n            total[name] += tensor", "engine(model, loss, rows, masks, clip).items():\n            total[name] = tensor")],
           of("dp/test_clipping", "test_any_micro_batch_gives_the_same_sum")),
    Mutant("B12a", "a factor that is not finite goes through", [
        (CLIPPING, "return torch.where(exact_enough, factor, torch.zeros_like(factor))", "return factor"), (CLIPPING, "        if factor > 0:\n", "        if True:\n"),
    ], of("dp/test_clipping", "test_a_unit_that_is_not_finite_counts_exactly_zero"), sample=True),
    Mutant("B12b", "a loss that is not finite counts if its gradient is", [(CLIPPING, " if bool(losses.isfinite().all()) else torch.tensor(0.0)", "")],
           of("dp/test_clipping", "test_a_loss_that_is_not_finite_counts_zero_though_its_gradient_is")),
    Mutant("B12c", "the factor of a huge gradient is rounded upwards as a subnormal number", [(CLIPPING, "squared_norm.isfinite() & (factor >= torch.finfo(torch.float32).tiny)", "squared_norm.isfinite()")],
           of("dp/test_clipping", "test_the_largest_floats_do_not_overshoot")),
    Mutant("B12d", "masking multiplies, and 0 x NaN is NaN", [(MASKS, "torch.where(expand(masks[name], t.shape), t, torch.zeros((), dtype=t.dtype, device=t.device))", "t * expand(masks[name], t.shape)")],
           of("dp/test_masks", "test_restrict_leaves_exact_zeros_even_for_nan")),
    Mutant("B13", "short gradients are stretched to C", [(CLIPPING, "torch.finfo(torch.float64).tiny)).clamp_max(1.0)", "torch.finfo(torch.float64).tiny))")],
           of("dp/test_clipping", "test_short_gradients_are_left_alone_and_zero_stays_zero")),
    Mutant("B14a", "norms in bfloat16", [(CLIPPING, "t.double().pow(2).sum().cpu() for t in gradient", "t.bfloat16().norm().double().pow(2).cpu() for t in gradient")],
           of("dp/test_clipping", "test_every_single_unit_is_within_the_clip_in_narrow_types")),
    Mutant("B14b", "norms in float16", [(CLIPPING, "t.double().pow(2).sum().cpu() for t in gradient", "t.half().norm().double().pow(2).cpu() for t in gradient")],
           of("dp/test_clipping", "test_every_single_unit_is_within_the_clip_in_narrow_types")),
    Mutant("B14c", "norms in float32", [(CLIPPING, "t.double().pow(2).sum().cpu() for t in gradient", "t.float().norm().double().pow(2).cpu() for t in gradient")],
           of("dp/test_clipping", "test_the_norm_does_not_overshoot_over_a_million_coordinates", "test_every_single_unit_is_within_the_clip_in_narrow_types")),
    Mutant("B14d", "sums in the model's own bfloat16", [(CLIPPING, "return torch.promote_types(dtype, torch.float32)", "return dtype")],
           of("dp/test_clipping", "test_narrow_models_are_summed_in_float32_and_equal_the_oracle")),
    Mutant("B19", "the declared sensitivity follows the batch", [(CLIPPING, "    return ClippedSum(total, sensitivity=clip)\n", "    return ClippedSum(total, sensitivity=min(clip, sum(float(t.norm()) for t in total.values())))\n")],
           REPLAY),
    Mutant("E9a", "rounding to the grid has no room below C", [
        (CLIPPING, "room = clip - grid * math.sqrt(selected(own, masks)) / 2", "room = clip"),
        (CLIPPING, "> math.floor((clip / grid) ** 2):", "< 0:"),
    ], of("dp/test_clipping", "test_on_the_grid_the_norm_is_bounded_in_integers")),
    Mutant("E9b", "what does not fit the grid's bound is lost", [(CLIPPING, "room = clip - grid * math.sqrt(selected(own, masks)) / 2", "room = clip * 1.0001")],
           of("dp/test_clipping", "test_on_the_grid_the_sum_is_near_that_of_floats")),
    Mutant("E9c", "sums on the grid are floats", [(CLIPPING, ".round().to(torch.int64) for name, t in own", ".round().to(torch.float32) for name, t in own"),
                                                  (CLIPPING, "torch.zeros_like(p, dtype=torch.int64)", "torch.zeros_like(p, dtype=torch.float32)")],
           of("dp/test_clipping", "test_on_the_grid_the_sum_is_the_same_to_the_bit_in_any_order_and_cut")),
]  # fmt: skip


def _scaled(row: str, factor: float) -> Mutant:
    return Mutant(
        row, f"noise of {factor} times its scale", [(NOISE, DRAWN, DRAWN.replace("(noise", f"({factor} * noise"))],
        of("dp/test_noise", "test_scale_mean_shape_and_tails"), sample=factor == 0.99,
    )  # fmt: skip


_noise = [
    Mutant("B5a", "no noise on biases and gains", [(NOISE, f"    {PLACE}", f"    if tensor.ndim < 2:\n        return tensor.float()\n    {PLACE}")],
           of("dp/test_noise", "test_every_tensor_gets_its_own_full_share")),
    Mutant("B5b", "no noise on convolutions", [(NOISE, f"    {PLACE}", f"    if tensor.ndim == 4:\n        return tensor.float()\n    {PLACE}")],
           of("dp/test_noise", "test_every_tensor_gets_its_own_full_share")),
    Mutant("B5c", "no noise on the last tensor", [(NOISE, RELEASED, "    noised |= {n: t for n, t in list(total.tensors.items())[-1:]}\n    ".lstrip() + RELEASED)],
           of("dp/test_noise", "test_every_tensor_gets_its_own_full_share")),
    Mutant("B6", "noise on dropped coordinates", [(NOISE, RELEASED, RELEASED.replace("restrict(noised, masks)", "noised"))],
           of("dp/test_noise", "test_dropped_coordinates_are_exactly_zero_and_kept_ones_are_not"), sample=True),
    *(_scaled(f"B8{letter}", factor) for letter, factor in zip("abcdef", (0.5, 0.71, 0.9, 0.99, 1.01, 1.05), strict=True)),
    Mutant("B8g", "noise without the sensitivity", [(NOISE, DRAWN, "noise_multiplier * drawn")], of("dp/test_noise", "test_the_scale_comes_from_the_sum_itself")),
    Mutant("B8h", "exact noise of 0.99 times its scale", [(NOISE, "scale = round(noise_multiplier *", "scale = round(0.99 * noise_multiplier *")],
           of("dp/test_noise", "test_on_the_grid_too")),
    Mutant("B8i", "noise scaled by the realised batch", [(MECHANISM, NOISED, NOISED.replace("settings.noise_multiplier", "settings.noise_multiplier * len(units) / settings.batch_size"))],
           of("dp/test_mechanism", "test_an_empty_batch_is_an_ordinary_step", "test_the_divisor_is_the_expected_batch")),
    Mutant("D10", "noise of the mean added to the sum", [(MECHANISM, NOISED, NOISED.replace("settings.noise_multiplier", "settings.noise_multiplier / settings.batch_size"))],
           of("dp/test_mechanism", "test_the_update_equals_the_oracle_and_the_noise_has_its_scale")),
    Mutant("B9a", "the sum is divided by the realised batch", [(MECHANISM, "divisor = settings.batch_size *", "divisor = max(len(units), 1) *")],
           of("dp/test_mechanism", "test_the_divisor_is_the_expected_batch"), sample=True),
    Mutant("B9b", "DP-SNIP divides by the realised batch", [(MECHANISM, SNIP, SNIP.replace("settings.batch_size", "max(len(units), 1)"))],
           of("dp/test_mechanism", "test_dp_snip_is_one_release_charged_and_noised_on_every_tensor")),
    Mutant("B9c", "unit_norm is ignored", [(MECHANISM, "if settings.unit_norm and", "if")], of("dp/test_mechanism", "test_the_divisor_is_the_expected_batch")),
    Mutant("B10a", "noise is added to every micro-batch", [(MECHANISM, TOTAL + NOISED,
        "    parts = [add_noise(reduce(_sum(settings, model, loss, p, masks, engine)), settings.noise_multiplier, masks, key, 'train', step + 1000 * i)"
        " for i, p in enumerate([[], *([r] for r in read(units))])]\n"
        "    noised = Released({n: sum(p.tensors[n] for p in parts) for n in parts[0].tensors}, parts[0].origin)\n")],
           of("test_invariance", "test_the_noise_of_a_step_is_added_once_whatever_the_parts")),
    Mutant("B11a", "every step has the same noise", [(NOISE, PLACE, 'place = ("noise", purpose, name)')], of("dp/test_noise", "test_no_two_places_share_noise"), sample=True),
    Mutant("B11b", "DP-SNIP and the first step have the same noise", [(NOISE, PLACE, 'place = ("noise", step, name)')], of("dp/test_noise", "test_no_two_places_share_noise")),
    Mutant("B11c", "parameters of one shape have the same noise", [(NOISE, PLACE, 'place = ("noise", purpose, step)')], of("dp/test_noise", "test_no_two_places_share_noise")),
    Mutant("B11d", "noise from a constant key", [(NOISE, "normal(key, 0,", 'normal(Key(b"0" * 32, True), 0,')], of("dp/test_noise", "test_no_two_places_share_noise")),
    Mutant("B11e", "noise repeats after 8192 coordinates", [(NOISE, "normal(key, 0, tensor.numel(), *place)", "normal(key, 0, min(tensor.numel(), 8192), *place).repeat(tensor.numel() // 8192 + 1)[: tensor.numel()]")],
           of("dp/test_noise", "test_no_two_places_share_noise")),
    Mutant("B11f", "DP-SNIP draws its noise where the first step does", [(MECHANISM, SNIP, SNIP.replace('"dp-snip"', '"train"'))],
           of("dp/test_mechanism", "test_dp_snip_and_the_first_step_share_neither_noise_nor_coins")),
    Mutant("B11g", "the noise of a coordinate depends on the mask", [(NOISE, PLACE, 'place = ("noise", purpose, step, name, *((int(masks[name].sum()),) if name in masks else ()))'),
                                                                   (NOISE, "_noised(tensor, total, noise_multiplier, key, purpose, step, name) for", "_noised(tensor, total, noise_multiplier, key, purpose, step, name, masks) for"),
                                                                   (NOISE, "step: int, name: str) -> Tensor", "step: int, name: str, masks: Masks) -> Tensor")],
           of("dp/test_noise", "test_the_noise_of_a_coordinate_depends_on_its_place_alone")),
    Mutant("A4", "DP-SNIP noises its first tensor only", [(MECHANISM, SNIP, SNIP.replace("return", "noised =") + "    first, *rest = total.tensors\n    return Released({first: noised.tensors[first], **{n: total.tensors[n] / settings.batch_size for n in rest}}, noised.origin)\n")],
           of("dp/test_mechanism", "test_dp_snip_is_one_release_charged_and_noised_on_every_tensor")),
    Mutant("E8a", "a key shows itself", [(RANDOMNESS, 'return f"Key(hidden, given={self.given})"', 'return f"Key({self.secret!r}, given={self.given})"')], of("dp/test_randomness", "test_a_key_is_long_and_never_shown")),
    Mutant("E8b", "short keys are accepted", [(RANDOMNESS, "len(self.secret) >= 32", "len(self.secret) >= 4")], of("dp/test_randomness", "test_a_key_is_long_and_never_shown")),
    Mutant("E8c", "keys of the system come from a constant", [("keys.py", "os.urandom(32)", 'hashlib.shake_256(b"42").digest(32)')], of("dp/test_randomness", "test_keys_come_from_the_system_unless_given")),
    Mutant("E8d", "a key that a user gave is not marked", [("keys.py", "given=True", "given=False")], of("dp/test_randomness", "test_keys_come_from_the_system_unless_given")),
    Mutant("E8e", "places run into each other", [(RANDOMNESS, "bytes([isinstance(part, str)]) + len(coded).to_bytes(8, \"big\") + coded", "coded")], of("dp/test_randomness", "test_places_do_not_run_into_each_other")),
    Mutant("E9d", "both zeros of the discrete Gaussian count", [(DISCRETE, "accepted &= ~((k == 0) & (j == 0) & (sign < 0))", "accepted &= (k >= 0)")], of("dp/test_discrete", "test_the_exact_probabilities")),
    Mutant("E9e", "the discrete Gaussian's tail is exponential", [(DISCRETE, "accepted = _all_true(k * (k - np.minimum(k, 1)), source)", "accepted = np.ones(count, np.bool_)")], of("dp/test_discrete", "test_the_exact_probabilities")),
    Mutant("E9f", "the discrete Gaussian's inside is flat", [(DISCRETE, "    accepted &= _exponential_trials(", "    accepted |= _exponential_trials(")], of("dp/test_discrete", "test_the_exact_probabilities")),
    Mutant("E9g", "exact noise repeats after a chunk", [(DISCRETE, "_Source(key, name, *where, chunk)", "_Source(key, name, *where)")], of("dp/test_noise", "test_no_two_places_share_noise")),
    Mutant("E9h", "whole numbers below a bound are biased", [(DISCRETE, "again = np.flatnonzero(drawn > limit)", "again = np.flatnonzero(drawn > largest)")], of("dp/test_discrete", "test_whole_numbers_below_a_bound_are_uniform")),
    Mutant("C7a", "noise comes from torch's global generator", [(RANDOMNESS, "    return both[start - aligned : stop - aligned]\n", "    return torch.randn(stop - start, dtype=torch.float64)\n")], of("dp/test_noise", "test_noise_reads_no_global_generator")),
    Mutant("C7b", "the second normal of a pair follows the first", [(RANDOMNESS, "radius * angle.sin()], dim=1", "radius * angle.cos()], dim=1")], of("dp/test_randomness", "test_normal_numbers_are_independent_within_a_pair_and_from_it")),
]  # fmt: skip

JOINED = "    return torch.from_numpy(np.flatnonzero(coins < bound))\n"
COINS = 'words(key, 0, num_units, "sampling", purpose, step)'
RECORDED = '    record("train", settings.event)\n'

_sampling = [
    Mutant("C1a", "batches of fixed size", [(SAMPLING, JOINED, "    return torch.from_numpy(np.sort(np.argsort(coins)[: round(rate * num_units)]))\n")],
           of("dp/test_sampling", "test_batch_sizes_have_the_binomial_spread"), sample=True),
    Mutant("C1b", "shuffled epochs", [(SAMPLING, f"    coins = {COINS}\n" + JOINED,
        "    batches = max(round(1 / rate), 1) if rate else 1\n"
        '    order = np.argsort(words(key, 0, num_units, "sampling", purpose, step // batches))\n'
        "    return torch.from_numpy(np.sort(np.array_split(order, batches)[step % batches]))\n")],
           of("dp/test_sampling", "test_participations_of_a_unit_have_the_binomial_spread")),
    Mutant("C2a", "large batches are cut to B", [(SAMPLING, JOINED, JOINED.replace("coins < bound)", "coins < bound)[: max(1, round(rate * num_units))]"))],
           of("dp/test_sampling", "test_batch_sizes_have_the_binomial_spread")),
    Mutant("C2b", "small batches are filled by repeating examples", [(SAMPLING, JOINED, "    joined = np.flatnonzero(coins < bound)\n"
        "    return torch.from_numpy(np.sort(np.resize(joined, max(len(joined), round(rate * num_units))))) if len(joined) else torch.from_numpy(joined)\n")],
           of("dp/test_sampling", "test_a_coin_belongs_to_its_unit_alone", "test_batch_sizes_have_the_binomial_spread")),
    Mutant("C3a", "an empty batch is skipped", [(MECHANISM, UNITS, UNITS + '    if len(units) == 0:\n        return Step(public({n: p.detach() * 0 for n, p in participating(model).items()}, "nothing"), masks)\n')],
           of("dp/test_mechanism", "test_an_empty_batch_is_an_ordinary_step")),
    Mutant("C3b", "an empty batch is drawn again", [(SAMPLING, JOINED, JOINED.replace("    return torch", "    joined = torch") + "    return joined if len(joined) or rate < 1e-3 else participants(key, step + 10**6, num_units, rate, purpose)\n")],
           of("dp/test_sampling", "test_empty_batches_happen_as_often_as_they_should")),
    Mutant("C3c", "an empty batch is not charged", [(MECHANISM, RECORDED, "    if len(participants(key, step, settings.num_units, settings.sampling_rate)):\n    " + RECORDED)],
           of("dp/test_mechanism", "test_an_empty_batch_is_an_ordinary_step")),
    Mutant("C4a", "units join one per cent more often than is charged", [(SAMPLING, "int(rate * 2.0**64)", "int(min(rate * 1.01, 0.999999) * 2.0**64)")],
           of("dp/test_sampling", "test_the_rate_over_ten_million_coins")),
    Mutant("C4b", "the rate is that of a ninth fewer units", [(SAMPLING, "int(rate * 2.0**64)", "int(min(rate / 0.9, 0.999999) * 2.0**64)")],
           of("dp/test_sampling", "test_the_rate_over_ten_million_coins")),
    Mutant("C6a", "the same batch at every step", [(SAMPLING, COINS, 'words(key, 0, num_units, "sampling", purpose)')],
           of("dp/test_sampling", "test_steps_units_and_purposes_are_independent"), sample=True),
    Mutant("C6b", "the batches come round again", [(SAMPLING, COINS, 'words(key, 0, num_units, "sampling", purpose, step % 4)')],
           of("dp/test_sampling", "test_steps_units_and_purposes_are_independent")),
    Mutant("C6c", "DP-SNIP and training share their coins", [(SAMPLING, COINS, 'words(key, 0, num_units, "sampling", step)')],
           of("dp/test_sampling", "test_steps_units_and_purposes_are_independent")),
    Mutant("C6d", "units share coins", [(SAMPLING, COINS, 'np.repeat(words(key, 0, num_units // 2 + 1, "sampling", purpose, step), 2)[:num_units]')],
           of("dp/test_sampling", "test_batch_sizes_have_the_binomial_spread")),
    Mutant("C6e", "a coin depends on how many units there are", [(SAMPLING, COINS, 'words(key, 0, num_units, "sampling", purpose, step, num_units)')],
           of("dp/test_sampling", "test_a_coin_belongs_to_its_unit_alone")),
    Mutant("E3", "two ranks work on the same units", [(SAMPLING, "units[rank::world_size]", "units[max(rank - 1, 0) :: world_size]")],
           of("dp/test_sampling", "test_shards_are_disjoint_and_together_everything")),
    Mutant("D8a", "a step is recorded after its rows were read", [(MECHANISM, RECORDED, ""), (MECHANISM, TOTAL, TOTAL + RECORDED)],
           of("dp/test_mechanism", "test_the_event_is_recorded_before_anything_is_read"), sample=True),
    Mutant("D8b", "steps are not recorded", [(MECHANISM, RECORDED, "")], of("dp/test_mechanism", "test_an_empty_batch_is_an_ordinary_step")),
    Mutant("A9", "DP-SNIP is not charged", [(MECHANISM, '    record("dp-snip", settings.event)\n', "")],
           of("dp/test_mechanism", "test_dp_snip_is_one_release_charged_and_noised_on_every_tensor")),
    Mutant("D8c", "a step of all units is charged as if sampled", [(MECHANISM, "gaussian_event(self.sampling_rate,", "gaussian_event(min(self.sampling_rate, 0.5),")],
           of("dp/test_mechanism", "test_what_a_step_spends")),
    Mutant("D8d", "a step without noise is charged nothing", [(MECHANISM, "return dp_accounting.NonPrivateDpEvent()", "return dp_accounting.NoOpDpEvent()")],
           of("dp/test_mechanism", "test_what_a_step_spends")),
]  # fmt: skip

MUTANTS = (*_masks, *_clipping, *_noise, *_sampling)
