"""The kinds of panels that the dashboards have, each with its units, legend, thresholds and description."""

from grafana_foundation_sdk.builders import bargauge, common as c, dashboard as d, prometheus
from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common, dashboard, prometheus as p

# Units of Grafana.
BYTES, BYTES_PER_S, SECONDS, PART = "bytes", "Bps", "s", "percentunit"
COUNT, PER_S, SAMPLES_PER_S, TIME = "short", "reqps", "samples/s", "dateTimeFromNow"

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")


def query(expr, legend="", instant=False):
    """Returns a query. An instant one asks for the end of the shown time only."""
    built = prometheus.Dataquery().expr(" ".join(expr.split())).legend_format(legend or "__auto")
    return built.instant() if instant else built.range()


def steps(*pairs):
    """Returns thresholds: the colour from the beginning, then (value, colour) pairs."""
    first, *rest = pairs
    found = [dashboard.Threshold(value=None, color=first)]
    found += [dashboard.Threshold(value=value, color=color) for value, color in rest]
    return d.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(found)


def words(*rows):
    """Returns mappings of values to words: (value, word, colour)."""
    options = {
        str(value): dashboard.ValueMappingResult(text=text, color=color, index=i)
        for i, (value, text, color) in enumerate(rows)
    }
    return [dashboard.ValueMap(options=options)]


def _common(panel, title, description, unit, width, height):
    panel = panel.title(title).description(" ".join(description.split())).datasource(SOURCE)
    return panel.unit(unit).span(width).height(height)


def _targets(panel, queries):
    for ref, target in zip("ABCDEFGH", queries):
        panel = panel.with_target(target.ref_id(ref))
    return panel


def number(title, description, expr, unit, thresholds=None, mappings=None, width=4, sparkline=False):
    """Returns a panel with one number, coloured by its thresholds."""
    panel = _common(stat.Panel(), title, description, unit, width, 4)
    panel = _targets(panel, [query(expr)])
    graph = common.BigValueGraphMode.AREA if sparkline else common.BigValueGraphMode.NONE
    panel = panel.reduce_options(c.ReduceDataOptions().calcs(["lastNotNull"])).graph_mode(graph)
    panel = panel.color_mode(common.BigValueColorMode.VALUE).no_value("no data")
    panel = panel.thresholds(thresholds or steps(BLUE))
    return panel.mappings(mappings) if mappings else panel


def lines(title, description, queries, unit, width=12, stacked=None, thresholds=None, most=None):
    """Returns a panel of lines. `stacked` is `normal` for sums, `percent` for parts of the whole."""
    panel = _common(timeseries.Panel(), title, description, unit, width, 8)
    panel = _targets(panel, queries).line_width(1).min(0)
    legend = c.VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE)
    legend = legend.placement(common.LegendPlacement.BOTTOM).show_legend(True).calcs(["lastNotNull", "max"])
    tooltip = c.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    panel = panel.legend(legend).tooltip(tooltip.sort(common.SortOrder.DESCENDING))
    if stacked:
        panel = panel.stacking(c.StackingConfig().mode(common.StackingMode(stacked))).fill_opacity(40)
    if thresholds:
        style = c.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        panel = panel.thresholds(thresholds).thresholds_style(style)
    return panel.max(most) if most is not None else panel


def bars(title, description, queries, unit, width=8, most=None, thresholds=None):
    """Returns a panel with a bar for each series."""
    panel = _common(bargauge.Panel(), title, description, unit, width, 8)
    panel = _targets(panel, queries).orientation(common.VizOrientation.HORIZONTAL).min(0)
    panel = panel.reduce_options(c.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.display_mode(common.BarGaugeDisplayMode.BASIC).thresholds(thresholds or steps(BLUE))
    return panel.max(most) if most is not None else panel


def states(title, description, queries, mappings, width=12):
    """Returns a panel that shows how states follow each other."""
    panel = _common(statetimeline.Panel(), title, description, COUNT, width, 8)
    panel = _targets(panel, queries).mappings(mappings).merge_values(True)
    panel = panel.show_value(common.VisibilityMode.NEVER).row_height(0.8).line_width(0).fill_opacity(70)
    legend = c.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST)
    legend = legend.placement(common.LegendPlacement.BOTTOM).show_legend(True)
    return panel.legend(legend).color_scheme(d.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))


def rows(title, description, columns, by, unit, width=12):
    """Returns a table with a row for each value of the label `by`. `columns` are (name, expression) pairs."""
    panel = _common(table.Panel(), title, description, unit, width, 8)
    queries = [query(expr, instant=True).format(p.PromQueryFormat.TABLE) for _, expr in columns]
    panel = _targets(panel, queries)
    joined = dashboard.DataTransformerConfig(id_val="joinByField", options={"byField": by, "mode": "outer"})
    one = len(columns) == 1
    names = {f"Value{'' if one else f' #{ref}'}": name for ref, (name, _) in zip("ABCDEFGH", columns)}
    times = {name: True for name in ("Time", "Time 1", "Time 2", "Time 3", "Time 4")}
    renamed = dashboard.DataTransformerConfig(
        id_val="organize", options={"excludeByName": times, "renameByName": names, "indexByName": {}}
    )
    panel = panel.transformations([renamed] if one else [joined, renamed])
    return panel.no_value("none").show_header(True)


def variable(name, label, of, all_value=False):
    """Returns a variable with the values of a label: `of` is `label_values(metric, label)`."""
    built = d.QueryVariable(name).label(label).datasource(SOURCE)
    built = built.query({"qryType": 1, "query": of, "refId": f"{name}-values"})
    built = built.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    built = built.sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    if all_value:
        everything = dashboard.VariableOption(text="All", value="$__all")
        built = built.multi(True).include_all(True).all_value(".*").current(everything)
    return built


def begin(title, uid, description):
    """Returns an empty dashboard with the choice of the Prometheus."""
    built = d.Dashboard(title).uid(uid).description(" ".join(description.split())).tags(["fletch"])
    built = built.time("now-3h", "now").refresh("30s").timezone("browser").readonly()
    built = built.tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    others = d.DashboardLink("Fletch").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["fletch"])
    built = built.link(others.as_dropdown(True).include_vars(True).keep_time(True))
    return built.with_variable(d.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))


def add_row(built, title, *panels):
    """Adds a row with its panels. Their widths fill lines of 24."""
    built.with_row(d.Row(title))
    for panel in panels:
        built.with_panel(panel)
