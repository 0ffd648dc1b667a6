"""The report of a back-test as text."""

import math
from collections.abc import Mapping
from typing import Any

from mpitrain.errors import counted
from mpitrain.planner.backtest_errors import MODES, SWEEP, UNFITTED, YARDSTICKS
from mpitrain.planner.fitted import quantile


def _percent(value: float) -> str:
    return "    -" if math.isnan(value) else f"{100 * value:5.1f}"


def _short(value: float) -> str:
    return _percent(value).strip()


def as_text(report: Mapping[str, Any], name: str) -> str:
    lines = [
        f"{name}: {counted(report['rows'], 'rows')}; {report['predicted']} predicted, {report['interval']} "
        f"between bounds (what decides is unknown), {len(report['refused'])} refused",
        f"of rows with complete fields {_percent(report['share_of_complete_rows_predicted'])} % "
        "are predicted",
    ]
    if not report["names_a_half"]:
        lines.append("no row names a half: nothing is fitted to own rows; calibrated = gpu")
    lines += ["", *_text_of_systems(report), "", *_text_of_bars(report), "", *_text_of_machines(report), ""]
    held, unknown = report["interval_holds"], report["unknown_held"]
    plain = report["sustained_holds"]
    lines += [
        f"80 % intervals hold {_percent(held['share'])} % of {counted(held['rows'], 'rows')}, "
        f"{_percent(held['median_width'])} % wide; bounds of unknown fields hold "
        f"{_percent(unknown['share'])} % of {unknown['rows']}",
        f"nothing fitted: measured over predicted is {plain['q10']:.3f} at the 10 % quantile, "
        f"{plain['q50']:.3f} in the median and {plain['q90']:.3f} at the 90 %; the interval that "
        f"mpitrain plan prints holds {_percent(plain['share'])} % of {counted(plain['rows'], 'rows')}",
        "",
        *_text_of_sweeps(report),
        "",
        *_text_of_memory(report),
        "",
        "assumed, of so many rows:",
        *(f"  {each['field']:<18}{each['rows']:>4}" for each in report["assumed"]),
        "",
        *_text_of_worst(report),
        "",
        "refused:",
        *(f"  {each['id']} {each['system']}: {each['why']}" for each in report["refused"]),
    ]
    return "\n".join(lines)


def _text_of_systems(report: Mapping[str, Any]) -> list[str]:
    head = "".join(f"{mode[:9]:>11}" for mode in (*MODES, *YARDSTICKS))
    lines = [
        "median |error| of a step in %, of rows that were not fitted to; then calibrated: 10, 50, "
        "90 % quantile with sign,",
        "rank correlation, what it was multiplied by (own: fitted to so many rows)",
        f"{'system':<52}{'rows':>5}{head}    quantiles           corr",
    ]
    for each in report["systems"]:
        medians = "".join(f"{_percent(each[mode]['median']):>11}" for mode in (*MODES, *YARDSTICKS))
        quantiles = " ".join(_percent(each["calibrated"][f"q{share}"]) for share in (10, 50, 90))
        own = f"own {each['fitted_rows']}" if each["fitted_rows"] else "of its GPU"
        correlation = each["rank_correlation"]
        shown = "  -" if math.isnan(correlation) else f"{correlation:5.2f}"
        lines.append(
            f"{each['system'][:51]:<52}{each['calibrated']['rows']:>5}{medians}  {quantiles}  "
            f"{shown}  {own}: x{each['factor']:.2f}"
        )
    return lines


def _text_of_bars(report: Mapping[str, Any]) -> list[str]:
    lines = ["median over systems of their median |error| in %:"]
    for name, each in report["bars"].items():
        words = ", ".join(f"{mode} {_short(each[mode])}" for mode in (*MODES, *YARDSTICKS))
        lines.append(f"  {name} ({each['systems']}): {words}")
    return lines


def _text_of_machines(report: Mapping[str, Any]) -> list[str]:
    lines = ["never calibrated, all rows, median over systems of |error| (and with its sign) in %:"]
    for machine, each in report["machines"].items():
        words = ", ".join(
            f"{mode} {_short(each[mode])} ({_short(each[f'{mode} signed'])})" for mode in UNFITTED
        )
        counts = f"{counted(each['systems'], 'systems')}, {counted(each['rows'], 'rows')}"
        lines.append(f"  {machine} ({counts}): {words}")
    return lines


def _text_of_sweeps(report: Mapping[str, Any]) -> list[str]:
    sweeps = report["sweeps"]
    lines = [f"choice, in {len(sweeps)} sweeps of {SWEEP} layouts or more:"]
    for where, several in (("on several nodes", True), ("inside a node", False)):
        own = [each for each in sweeps if each["several_nodes"] == several]
        if own:
            losses = [each["loss"] for each in own]
            random = quantile([each["random_loss"] for each in own], 0.5)
            spread = [each["rank_correlation"] for each in own if each["spread"] > 0.3]
            median, most = (_short(quantile(losses, share)) for share in (0.5, 0.9))
            lines.append(
                f"  {where} ({len(own)}): the first choice loses {median} % (median), {most} (90 %); "
                f"a random pick {_short(random)}; rank correlation where it matters "
                f"{quantile(spread, 0.5):.2f}"
            )
    return lines


def _text_of_memory(report: Mapping[str, Any]) -> list[str]:
    lines = ["memory by formula (mem_gb in GiB): median, 90 %, with sign; then with two constants fitted:"]
    lines += [
        f"  {each['system']} ({each['definition']}, {counted(each['rows'], 'rows')}): "
        f"{_short(each['median'])} %, {_short(each['p90'])}, {_short(each['signed'])}; "
        + (
            f"{_short(each['after_fit_median'])} of {each['after_fit_rows']}"
            if each["definition"] != "max allocated"
            else "not needed"
        )
        for each in report["memory"]
    ]
    return lines


def _text_of_worst(report: Mapping[str, Any]) -> list[str]:
    lines = ["worst rows:"]
    for each in report["worst"]:
        exposed = ", ".join(
            f"{axis} {100 * share:.0f} %" for axis, share in each["exposed"].items() if share > 0.01
        )
        assumed = ", ".join(f"{key} = {value}" for key, value in each["assumed"].items())
        lines.append(
            f"  {each['id']} {each['model']}, {each['layout']}: published "
            f"{each['published_s']:.3g} s, predicted {each['predicted_s']:.3g} "
            f"({100 * each['error']:+.0f} %); of it bubble {100 * each['bubble']:.0f} %, exposed "
            f"{exposed or 'nothing'}; assumed {assumed or 'nothing'}"
            + "; memory nearly full"
            * each["nearly_full"]
        )
    return lines
