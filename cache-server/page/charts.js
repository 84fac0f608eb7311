// Draws histories with uPlot. Each chart has its last values as text beside it.

import { h } from "./dom.js";
import { bytes, percent, rate } from "./words.js";

const LINES = {
    delivered: { words: "delivered", color: "--delivered", text: (v) => `${bytes(v)}/s`, dash: [] },
    origin: { words: "read from origins", color: "--origin", text: (v) => `${bytes(v)}/s`, dash: [6, 4] },
    avoided: { words: "avoided", color: "--avoided", text: (v) => `${bytes(v)}/s`, dash: [2, 3] },
    errors: { words: "errors of the server", color: "--bad", text: (v) => `${rate(v)}/s`, dash: [] },
    rate: { words: "samples", color: "--delivered", text: (v) => `${rate(v)}/s`, dash: [] },
    stalled: { words: "part of the time in which it waits", color: "--origin", text: percent, dash: [6, 4] },
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Times of an axis, by the clock of the reader: days where the axis has some. */
function times(_, ticks) {
    const days = ticks.length > 1 && ticks.at(-1) - ticks[0] > 2 * 86400;
    const form = days
        ? { month: "short", day: "numeric" }
        : { hour: "2-digit", minute: "2-digit", hour12: false };
    const short = !days && ticks.length > 1 && ticks[1] - ticks[0] < 60;
    return ticks.map((t) =>
        new Date(t * 1000).toLocaleString("en-GB", short ? { ...form, second: "2-digit" } : form),
    );
}

/** A figure for some lines of a history. `show` replaces its numbers. */
export function chart(title, names) {
    const place = h("div", { class: "plot" });
    const key = h("p", { class: "key" });
    const figure = h("figure", null, h("figcaption", null, title), place, key);
    let plot, shown, drawn;

    function draw() {
        if (!shown || !place.clientWidth || typeof uPlot === "undefined") {
            return;
        }
        const lines = names.map((name) => [LINES[name], shown.series.find((s) => s.name === name)]);
        const data = [shown.times, ...lines.map(([, s]) => s?.values ?? shown.times.map(() => null))];
        const look = `${place.clientWidth} ${color("--text")}`;
        if (plot && look === drawn) {
            plot.setData(data);
            return;
        }
        plot?.destroy();
        drawn = look;
        const axis = {
            stroke: color("--soft"),
            grid: { stroke: color("--line"), width: 1 },
            ticks: { show: false },
            font: "12px system-ui, sans-serif",
        };
        const text = LINES[names[0]].text;
        plot = new uPlot(
            {
                width: place.clientWidth,
                height: 150,
                legend: { show: false },
                cursor: { drag: { x: false } },
                scales: {
                    // A server that has just started shows five minutes.
                    x: { range: (_, min, max) => [Math.min(min ?? 0, (max ?? 300) - 300), max ?? 300] },
                    y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] },
                },
                axes: [
                    { ...axis, space: 90, size: 28, values: times },
                    { ...axis, size: 76, values: (_, ticks) => ticks.map((v) => text(v)) },
                ],
                series: [
                    {},
                    ...lines.map(([line]) => ({
                        stroke: color(line.color),
                        width: 2,
                        dash: line.dash,
                        spanGaps: false,
                        points: { show: false },
                    })),
                ],
            },
            data,
            place,
        );
    }

    new ResizeObserver(draw).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return {
        figure,
        show(history) {
            shown = history;
            const items = names.map((name) => {
                const line = LINES[name];
                const values = history.series.find((s) => s.name === name)?.values ?? [];
                const last = values.findLast((v) => v !== null);
                return h(
                    "span",
                    { class: `line ${name}` },
                    h("i", { "aria-hidden": "true" }),
                    `${line.words}: ${last === undefined ? "–" : line.text(last)}`,
                );
            });
            key.replaceChildren(...items);
            draw();
        },
        say(text) {
            key.replaceChildren(h("span", { class: "bad-text", role: "alert" }, text));
        },
    };
}
