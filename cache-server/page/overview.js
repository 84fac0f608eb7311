// The first view: does it work, what did it save, who holds the cache, who waits, and what is wrong.

import { read } from "./access.js";
import { chart } from "./charts.js";
import { bar, h, number, patch, sizeBars, table } from "./dom.js";
import { ago, bytes, count, doing, duration, part, percent, plural, split, time } from "./words.js";

const RANGES = [
    ["1h", "1 hour"],
    ["6h", "6 hours"],
    ["24h", "24 hours"],
    ["7d", "7 days"],
    ["30d", "30 days"],
];

export const jobLink = (job) => h("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.name);
export const datasetLink = (domain, name) =>
    h("a", { href: `#/datasets/${encodeURIComponent(domain)}/${encodeURIComponent(name)}` }, name);

/** The view, with `update` for each event. */
export function overview() {
    const slots = Object.fromEntries(
        ["health", "saved", "cache", "jobs", "datasets", "origins", "mounts"].map((name) => [name, h("div")]),
    );
    const lines = chart("Bytes a second", ["delivered", "origin", "avoided"]);
    const range = h(
        "select",
        { id: "range" },
        RANGES.map(([word, words]) => h("option", { value: word }, words)),
    );
    const ranges = h(
        "p",
        { class: "ranges", hidden: true },
        h("label", { for: "range" }, "Range"),
        " ",
        range,
    );
    let hour;

    async function showRange() {
        const asked = range.value;
        if (asked === "1h") {
            hour && lines.show(hour);
            return;
        }
        try {
            const history = await read(`/v1/dashboard/history?range=${asked}`);
            asked === range.value && lines.show(history);
        } catch (e) {
            lines.say(`${e.message}. ${e.hint ?? ""}`);
        }
    }
    range.onchange = showRange;

    const section = (id, title, ...content) =>
        h("section", { "aria-labelledby": id }, h("h2", { id }, title), content);
    const root = h(
        "div",
        { class: "overview" },
        h("h1", { class: "unseen" }, "Overview"),
        h(
            "div",
            { class: "top" },
            section("health", "Does it work?", slots.health),
            section("saved", "What did it save?", slots.saved),
            section("cache", "The cache", slots.cache),
        ),
        section("jobs", "Jobs: who waits, for what, since when", slots.jobs),
        section("datasets", "Datasets: their part of the cache and of themselves", slots.datasets),
        section("history", "The last hour", ranges, lines.figure),
        slots.origins,
        slots.mounts,
    );

    return {
        root,
        history(history) {
            hour = history;
            range.value === "1h" && lines.show(history);
        },
        update(now) {
            ranges.hidden = !now.server.has_prometheus;
            const views = {
                health: health(now),
                saved: saved(now),
                cache: cache(now),
                jobs: jobs(now.jobs, now),
                datasets: datasets(now),
                origins: origins(now),
                mounts: mounts(now.mounts, now.mounts_total),
            };
            for (const [name, view] of Object.entries(views)) {
                patch(slots[name], h("div", null, view));
            }
            sizeBars(root);
        },
    };
}

export function problemList(problems) {
    return h(
        "ul",
        { class: "problems" },
        problems.map((p) =>
            h(
                "li",
                { class: p.severity },
                h("strong", null, p.severity === "critical" ? "Critical: " : "Warning: ", p.subject),
                h("span", { class: "detail" }, p.detail),
                h("a", { href: `#${p.runbook}` }, `What to do: ${p.alert}`),
            ),
        ),
    );
}

function health(now) {
    const critical = now.problems.filter((p) => p.severity === "critical").length;
    const warnings = now.problems.length - critical;
    const [kind, words] =
        now.server.phase !== "ready"
            ? ["warning", `The server is ${now.server.phase}`]
            : critical
              ? [
                    "critical",
                    `No: ${plural(critical, "problem")}${warnings ? `, and ${plural(warnings, "warning")}` : ""}`,
                ]
              : warnings
                ? ["warning", `Yes, with ${plural(warnings, "warning")}`]
                : ["good", "Yes, nothing is wrong"];
    const counts = now.jobs_by_state;
    return [
        h("p", { class: `verdict ${kind}` }, words),
        h(
            "p",
            { class: "soft" },
            "up for ",
            number(duration(now.server.uptime_s), now.server.uptime_s, "uptime"),
            ` · ${plural(now.jobs_total, "job")}: ${counts.stalled} stalled, ${counts.waiting} waiting, ` +
                `${counts.running} running, ${counts.idle} idle`,
        ),
        now.problems.length > 0 && problemList(now.problems),
    ];
}

function saved(now) {
    const s = now.savings;
    const saving = part(s.avoided_bytes, s.delivered_bytes);
    return [
        h(
            "p",
            { class: "big" },
            number(bytes(s.avoided_bytes), s.avoided_bytes, "avoided"),
            h("span", { class: "unit" }, ` (${percent(saving)}) not read from origins`),
        ),
        h(
            "p",
            { class: "big second" },
            number(count(s.avoided_requests), s.avoided_requests, "avoided-requests"),
            h("span", { class: "unit" }, " requests not sent to origins"),
        ),
        bar(`${percent(saving)} of the delivered bytes`, ["hit", saving]),
        h(
            "p",
            { class: "soft" },
            number(bytes(s.delivered_bytes), s.delivered_bytes, "delivered"),
            " delivered, ",
            number(bytes(s.origin_bytes), s.origin_bytes, "origin"),
            " read from origins, since the server's state directory is in use",
        ),
    ];
}

function cache(now) {
    const disk = now.disk;
    if (!disk) {
        return h("p", null, "The server keeps nothing on disk (cache.size = 0).");
    }
    const full = part(disk.chunk_bytes, disk.capacity_bytes);
    return [
        h(
            "p",
            { class: "big" },
            number(bytes(disk.chunk_bytes), disk.chunk_bytes, "cached"),
            disk.capacity_bytes &&
                h(
                    "span",
                    { class: "unit" },
                    " of ",
                    number(bytes(disk.capacity_bytes), disk.capacity_bytes, "capacity"),
                ),
        ),
        disk.capacity_bytes && bar(`${percent(full)} full`, ["hit", full]),
        h(
            "p",
            { class: "soft" },
            `disk: ${disk.state} · `,
            number(count(disk.chunks), disk.chunks, "chunks"),
            ` chunks · policy ${disk.policy}`,
        ),
    ];
}

function splitBar(job) {
    const { all, parts } = split(job);
    if (!all) {
        return h("span", { class: "soft" }, "nothing yet");
    }
    const cached = parts[0].part + parts[1].part;
    return [
        bar(
            parts.map((p) => `${p.words} ${percent(p.part)}`).join(", "),
            ...parts.map((p) => [p.kind, p.part]),
        ),
        h("span", { class: "beside" }, `${percent(cached)} from cache`),
    ];
}

function progress(job) {
    const e = job.epoch;
    if (!e) {
        return h("span", { class: "soft" }, job.is_declared ? "not open" : "reads files");
    }
    const done = part(e.acked, e.planned);
    return [
        bar(`epoch ${e.epoch}: ${percent(done)}`, ["done", done]),
        h("span", { class: "beside" }, `epoch ${e.epoch}: ${percent(done)}`),
    ];
}

/** The table of jobs. `total` is that of the server. */
export function jobs(rows, now, total = now.jobs_total) {
    const columns = [
        ["Job", (j) => [jobLink(j), now.server.is_admin && h("span", { class: "soft" }, ` ${j.tenant}`)]],
        [
            "Now",
            (j) => [
                h("span", { class: `state ${j.state}` }, doing(j)),
                h("span", { class: "soft" }, ` for ${ago(j.since_ns, now.at_ns)}`),
            ],
        ],
        ["Dataset", (j) => datasetLink(j.domain, j.dataset)],
        ["Progress", progress],
        ["Time left", (j) => duration(j.eta_s), "n"],
        ["Bytes from", splitBar],
        ["Waited", (j) => number(duration(j.stalled_ms / 1000), j.stalled_ms, "stalled"), "n"],
    ];
    return [
        table("Those that stand still or wait come first", columns, rows, "No job has asked for anything."),
        more(rows.length, total, "jobs", "fletch jobs list"),
    ];
}

function more(shown, total, what, command) {
    return (
        total > shown &&
        h(
            "p",
            { class: "soft" },
            `${shown} of ${count(total)} ${what}; `,
            h("button", { type: "button", onclick: () => dispatchEvent(new Event("more")) }, "show more"),
            ` or run `,
            h("code", null, command),
        )
    );
}

function datasets(now) {
    const all = now.disk?.capacity_bytes || now.datasets.reduce((sum, d) => sum + (d.cached_bytes ?? 0), 0);
    const columns = [
        [
            "Dataset",
            (d) => [
                datasetLink(d.domain, d.dataset),
                now.server.is_admin && h("span", { class: "soft" }, ` ${d.domain}`),
                d.is_failing && h("span", { class: "state stalled" }, " its origin fails"),
            ],
        ],
        [
            "Of itself in the cache",
            (d) =>
                d.layout_bytes
                    ? [
                          bar(`${percent(part(d.cached_bytes, d.layout_bytes))} of itself`, [
                              "hit",
                              part(d.cached_bytes, d.layout_bytes),
                          ]),
                          h("span", { class: "beside" }, percent(part(d.cached_bytes, d.layout_bytes))),
                      ]
                    : h("span", { class: "soft" }, "size not known yet"),
        ],
        [
            "Of the cache",
            (d) => [
                bar(`${percent(part(d.cached_bytes, all))} of the cache`, [
                    "share",
                    part(d.cached_bytes, all),
                ]),
                h("span", { class: "beside" }, percent(part(d.cached_bytes, all))),
            ],
        ],
        ["Cached", (d) => number(bytes(d.cached_bytes), d.cached_bytes, `cached/${d.dataset}`), "n"],
        ["Size", (d) => number(bytes(d.version_bytes), d.version_bytes, `size/${d.dataset}`), "n"],
        [
            "Delivered",
            (d) => number(bytes(d.delivered_bytes), d.delivered_bytes, `delivered/${d.dataset}`),
            "n",
        ],
        ["Saved", (d) => number(bytes(d.avoided_bytes), d.avoided_bytes, `avoided/${d.dataset}`), "n"],
        ["Jobs", (d) => count(d.jobs), "n"],
    ];
    return [
        table(
            "Those that occupy most come first",
            columns,
            now.datasets,
            "No dataset is registered: fletch register NAME URI",
        ),
        more(now.datasets.length, now.datasets_total, "datasets", "fletch status"),
    ];
}

function origins(now) {
    if (!now.origins.length) {
        return null;
    }
    const columns = [
        ["Origin", (o) => h("code", null, o.uri)],
        [
            "Now",
            (o) =>
                h(
                    "span",
                    { class: `state ${o.state === "failing" ? "stalled" : "running"}` },
                    o.state === "failing" ? "fails" : "works",
                ),
        ],
        ["Calls", (o) => count(o.requests), "n"],
        ["Failed", (o) => count(o.failed), "n"],
        [
            "Last error",
            (o) =>
                o.last_error ? `${o.last_error.why} (${ago(o.last_error.at_ns, now.at_ns)} ago)` : "none",
        ],
    ];
    return h(
        "section",
        { "aria-labelledby": "origins" },
        h("h2", { id: "origins" }, "Origins"),
        table("Those that fail come first", columns, now.origins, ""),
    );
}

export function mounts(rows, total = rows.length) {
    if (!rows.length) {
        return null;
    }
    const columns = [
        ["Mount", (m) => h("code", null, `${m.host}:${m.dir}`)],
        ["Dataset", (m) => `${m.dataset}@${m.version}`],
        ["Job", (m) => m.job],
        [
            "Now",
            (m) => h("span", { class: `state ${m.problem ? "stalled" : "running"}` }, m.problem ?? "works"),
        ],
        ["Seen", (m) => time(m.seen_ns)],
    ];
    return h(
        "section",
        { "aria-labelledby": "mounts" },
        h("h2", { id: "mounts" }, `Mounts (${count(total)})`),
        table("Those with a problem come first", columns, rows, ""),
    );
}
