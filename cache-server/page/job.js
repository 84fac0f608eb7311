// The view of one job: its epoch, what it waits for, where its bytes come from, and its receipts.

import { read } from "./access.js";
import { chart } from "./charts.js";
import { bar, h, number, patch, sizeBars, table } from "./dom.js";
import { datasetLink } from "./overview.js";
import { ago, bytes, count, doing, duration, part, percent, plural, rate, split } from "./words.js";

const VERDICTS = {
    compute: "hardly waits for data",
    preparation: "waits for its own preparation",
    origin: "waits for the origin",
    disk: "waits for the server's disk",
    queue: "waits for the server",
};

export function jobView(id) {
    const slots = { head: h("div"), epochs: h("div"), receipt: h("div", { role: "status" }) };
    const speed = chart("Samples a second", ["rate"]);
    const waits = chart("Part of the time in which it waits", ["stalled"]);
    const root = h(
        "div",
        { class: "detail" },
        slots.head,
        h(
            "section",
            { "aria-labelledby": "hour" },
            h("h2", { id: "hour" }, "The last hour"),
            h("div", { class: "pair" }, speed.figure, waits.figure),
        ),
        h(
            "section",
            { "aria-labelledby": "epochs" },
            h("h2", { id: "epochs" }, "Epochs and receipts"),
            slots.epochs,
            slots.receipt,
        ),
    );
    const path = `/v1/dashboard/jobs/${encodeURIComponent(id)}`;

    async function showReceipt(epoch) {
        try {
            const { receipt, certificate } = await read(`${path}/epochs/${epoch}/receipt`);
            patch(slots.receipt, h("div", { role: "status" }, receiptView(receipt, certificate)));
        } catch (e) {
            patch(
                slots.receipt,
                h(
                    "div",
                    { role: "status" },
                    h("p", { class: "bad-text" }, `Epoch ${epoch}: ${e.message}. ${e.hint ?? ""}`),
                ),
            );
        }
    }

    return {
        root,
        every: 3000,
        async refresh(now) {
            const { row, job, history } = await read(path);
            patch(slots.head, h("div", null, head(row, job, now())));
            patch(slots.epochs, h("div", null, epochs(row, job, showReceipt)));
            speed.figure.hidden = !row.is_declared;
            speed.show(history);
            waits.show(history);
            sizeBars(root);
        },
    };
}

function head(row, job, now) {
    const e = row.epoch;
    const { all, parts } = split(row);
    const at = now?.at_ns ?? Date.now() * 1e6;
    return [
        h("h1", null, row.name),
        h("p", { class: `verdict ${row.state}` }, `It ${doing(row)}, for ${ago(row.since_ns, at)}`),
        h(
            "p",
            { class: "soft" },
            "reads ",
            datasetLink(row.domain, row.dataset),
            ` · tenant ${row.tenant}`,
            job && ` · order ${job.order} · ${plural(job.world.ranks, "rank")}, batch ${job.world.batch}`,
        ),
        e &&
            h(
                "section",
                { "aria-labelledby": "progress" },
                h("h2", { id: "progress" }, `Epoch ${e.epoch}: ${e.state}`),
                bar(
                    percent(part(e.acked, e.planned)),
                    ["done", part(e.acked, e.planned)],
                    ["held", part(e.held, e.planned)],
                ),
                h(
                    "p",
                    null,
                    number(count(e.acked), e.acked, "acked"),
                    " of ",
                    number(count(e.planned), e.planned, "planned"),
                    ` samples acknowledged (${percent(part(e.acked, e.planned))}), ${count(e.held)} held, ` +
                        `${count(e.redelivered)} granted again`,
                ),
                h(
                    "p",
                    null,
                    "rate ",
                    number(`${rate(row.rate)} samples/s`, row.rate, "rate"),
                    " · left ",
                    number(duration(row.eta_s), row.eta_s, "eta"),
                ),
            ),
        h(
            "section",
            { "aria-labelledby": "bytes" },
            h("h2", { id: "bytes" }, "Where its bytes came from"),
            bar(
                parts.map((p) => `${p.words} ${percent(p.part)}`).join(", "),
                ...parts.map((p) => [p.kind, p.part]),
            ),
            h(
                "ul",
                { class: "key" },
                parts.map((p) =>
                    h(
                        "li",
                        { class: `line ${p.kind}` },
                        h("i", { "aria-hidden": "true" }),
                        `${p.words}: `,
                        number(bytes(p.n), p.n, p.kind),
                        ` (${percent(p.part)})`,
                    ),
                ),
            ),
            h(
                "p",
                null,
                number(bytes(all), all, "delivered"),
                " delivered, ",
                number(bytes(row.origin_bytes), row.origin_bytes, "origin"),
                " read from the origin for it",
            ),
        ),
        h(
            "section",
            { "aria-labelledby": "waits" },
            h("h2", { id: "waits" }, "What it waits for"),
            h(
                "p",
                null,
                "Its replies waited ",
                number(duration(row.stalled_ms / 1000), row.stalled_ms, "stalled"),
                ` in all, ${percent(row.stall_part)} of the last minute.`,
            ),
            benefit(job),
        ),
    ];
}

// The same as `slows_with_cache` of the API's types.
function slowsWithCache(estimate) {
    const rates = [estimate.rate, ...estimate.what_if.map((w) => w.rate)];
    return rates.slice(1).some((rate, i) => rate < 0.99 * rates[i]);
}

function benefit(job) {
    const estimate = job?.benefit?.estimate;
    if (!estimate) {
        return h(
            "p",
            { class: "soft" },
            job?.benefit?.not_measured ?? "What cache is worth to it is not measured.",
        );
    }
    const more = estimate.what_if.map(
        (w) => `with ${percent(w.cached)} cached ${(w.rate / estimate.rate).toFixed(2)} ×`,
    );
    return h(
        "p",
        null,
        `By its acknowledgements it ${VERDICTS[estimate.verdict] ?? estimate.verdict}: ` +
            `${percent(estimate.compute)} of its time it computes, ` +
            `${percent(estimate.preparation)} it prepares, ${percent(estimate.fetch)} it waits for data. ` +
            `${percent(estimate.cached)} of its bytes come from the cache` +
            (more.length ? `; ${more.join(", ")} the speed` : "") +
            (slowsWithCache(estimate) ? ", because the server's disk is the limit then." : "."),
    );
}

function epochs(row, job, showReceipt) {
    if (!row.is_declared) {
        return h("p", { class: "soft" }, "The job was not declared, so it has no epochs.");
    }
    if (!job) {
        return h("p", { class: "soft" }, "The job is closed: its next request opens it.");
    }
    const columns = [
        ["Epoch", (e) => String(e.epoch)],
        ["State", (e) => e.state],
        ["Acknowledged", (e) => `${count(e.acked)} of ${count(e.planned)}`, "n"],
        ["Granted again", (e) => count(e.redelivered), "n"],
        ["Checkpoints", (e) => count(e.commits.length), "n"],
        ["Ledger", (e) => bytes(e.ledger_bytes), "n"],
        [
            "Receipt",
            (e) =>
                e.state === "finished"
                    ? h(
                          "button",
                          { type: "button", onclick: () => showReceipt(e.epoch) },
                          `Receipt of epoch ${e.epoch}`,
                      )
                    : "not finished",
        ],
    ];
    return table(
        "The epochs that the server remembers",
        columns,
        [...job.epochs].reverse(),
        "No epoch has begun.",
    );
}

function receiptView(receipt, certificate) {
    const value = typeof receipt.value === "string" ? receipt.value : JSON.stringify(receipt.value);
    return h(
        "div",
        { class: "receipt" },
        h("h3", null, `Receipt of epoch ${receipt.epoch}`),
        h(
            "p",
            null,
            `${count(receipt.delivered)} samples delivered, ${count(receipt.redelivered)} granted again, ` +
                `${count(receipt.dropped.length)} left out by the tail, ${count(receipt.padded)} pads. ` +
                `The order is ${certificate.poor ? "poorly" : "well"} shuffled.`,
        ),
        h(
            "p",
            { class: "soft" },
            "Sum ",
            h("code", null, `${value.slice(0, 24)}…`),
            "; fletch receipt verify compares it with the version.",
        ),
    );
}
