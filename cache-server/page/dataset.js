// The view of one dataset: its versions and tags, its part of the cache, its jobs and mounts.

import { read } from "./access.js";
import { bar, h, number, patch, sizeBars, table } from "./dom.js";
import { jobs, mounts } from "./overview.js";
import { bytes, count, part, percent, time } from "./words.js";

export function datasetView(domain, name) {
    const slot = h("div");
    const root = h("div", { class: "detail" }, slot);
    const path = `/v1/dashboard/datasets/${encodeURIComponent(domain)}/${encodeURIComponent(name)}`;
    return {
        root,
        every: 10000,
        async refresh(now) {
            // The state of the server may have come while the answer was on its way.
            const answer = await read(path);
            patch(slot, h("div", null, view(answer, now())));
            sizeBars(root);
        },
    };
}

function view(d, now) {
    const { row } = d;
    const own = part(row.cached_bytes, row.layout_bytes);
    const capacity = now?.disk?.capacity_bytes;
    return [
        h("h1", null, row.dataset),
        row.is_failing && h("p", { class: "verdict critical" }, "Its origin fails"),
        h(
            "p",
            { class: "soft" },
            "objects at ",
            h("code", null, row.uri),
            ", tables at ",
            h("code", null, d.tables),
            `, domain ${row.domain}, registered ${time(d.registered_ns)}`,
        ),
        h(
            "section",
            { "aria-labelledby": "cached" },
            h("h2", { id: "cached" }, "In the cache"),
            bar(`${percent(own)} of itself`, ["hit", own]),
            h(
                "p",
                null,
                number(bytes(row.cached_bytes), row.cached_bytes, "cached"),
                " of ",
                number(bytes(row.layout_bytes), row.layout_bytes, "layout"),
                ` (${percent(own)} of itself`,
                capacity && `, ${percent(part(row.cached_bytes, capacity))} of the cache`,
                "); its share is ",
                number(bytes(row.share_bytes), row.share_bytes, "share"),
            ),
            h(
                "p",
                null,
                number(bytes(row.delivered_bytes), row.delivered_bytes, "delivered"),
                " delivered, ",
                number(bytes(row.origin_bytes), row.origin_bytes, "origin"),
                " read from its origins, ",
                number(bytes(row.avoided_bytes), row.avoided_bytes, "avoided"),
                " saved: ",
                number(count(row.avoided_requests), row.avoided_requests, "avoided-requests"),
                " requests were not sent",
            ),
        ),
        h(
            "section",
            { "aria-labelledby": "versions" },
            h("h2", { id: "versions" }, "Versions and tags"),
            d.tags_problem && h("p", { class: "bad-text" }, `The tags are not complete: ${d.tags_problem}`),
            table(
                "Those that the server knows now",
                [
                    ["Root", (v) => h("code", { title: v.root }, v.root.slice(0, 12))],
                    ["Tags", (v) => v.tags.join(", ") || "none"],
                    ["Content", (v) => bytes(v.bytes), "n"],
                    [
                        "Known",
                        (v) => (v.draft ? `draft, ${percent(part(v.draft.known_bytes, v.draft.bytes))}` : "all"),
                    ],
                    ["Files", (v) => count(v.files ?? v.entries), "n"],
                    ["Made", (v) => time(v.created_ns)],
                    ["Jobs", (v) => count(v.jobs), "n"],
                    ["Mounts", (v) => count(v.mounts), "n"],
                ],
                d.versions,
                "No version was read since the server started.",
            ),
        ),
        now &&
            h(
                "section",
                { "aria-labelledby": "readers" },
                h("h2", { id: "readers" }, "Jobs"),
                jobs(d.jobs, now, d.jobs.length),
            ),
        mounts(d.mounts),
    ];
}
