//! `GET /`: an overview of the server for people. Plain HTML without scripts.

use super::cluster::{accounts_of, origin_views};
use crate::{auth::Principal, server::Server};
use axum::{extract::State, response::Html};
use fletch_api::{DatasetUse, OriginState};
use fletch_settings::ByteSize;
use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

/// The most rows of a table.
const ROWS_MAX: usize = 200;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 \
    1rem;color:#222}\
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #ddd;vertical-align:top}\
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad td{color:#a00}code{font-size:.9em}";

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Formats bytes for people, with one decimal.
fn size(n: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => {
            let tenths = u128::from(n) * 10 / u128::from(*unit);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
        None => format!("{n} B"),
    }
}

/// Returns the page.
pub async fn page(State(server): State<Arc<Server>>, principal: Principal) -> Html<String> {
    Html(render(&server, &principal).unwrap_or_else(|_| "the page could not be formatted".to_owned()))
}

fn render(server: &Server, principal: &Principal) -> Result<String, std::fmt::Error> {
    let mut out = String::with_capacity(4096);
    let s = server.store.stats();
    write!(
        out,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Fletch</title><style>{STYLE}</style>"
    )?;
    write!(out, "<h1>Fletch {} at {}</h1>", env!("CARGO_PKG_VERSION"), escape(&server.url))?;
    write!(
        out,
        "<p>{:?} for {} s, {} connections, {} jobs. <a href=\"/metrics\">metrics</a> · <a \
            href=\"/v1/accounts\">accounts</a> · <a href=\"/v1/openapi.json\">API</a></p>",
        server.phase(),
        server.uptime().as_secs(),
        server.connections.open(),
        server.live_jobs.len(),
    )?;
    failing_origins(&mut out, server)?;
    datasets(&mut out, server, principal)?;
    write!(out, "<h2>Bytes delivered</h2><table><tr><th>job<th>result<th>tier<th>bytes</tr>")?;
    let mut rows: BTreeMap<_, u64> = BTreeMap::new();
    for a in accounts_of(server, principal) {
        *rows.entry((a.key.job, a.key.result, a.key.tier)).or_default() += a.bytes;
    }
    for ((job, result, tier), bytes) in rows.iter().take(ROWS_MAX) {
        write!(
            out,
            "<tr><td>{}<td>{}<td>{}<td class=\"n\">{}</tr>",
            escape(job.as_str()),
            result.as_str(),
            tier.as_str(),
            size(*bytes)
        )?;
    }
    write!(out, "</table><h2>Memory</h2><table>")?;
    let (parts, blocks) = server.versions.table_memory();
    for (label, n) in [
        ("chunks cached", s.cached_bytes),
        ("chunk buffers alive", s.live_bytes),
        ("version tables", parts + blocks),
    ] {
        write!(out, "<tr><td>{label}<td class=\"n\">{}</tr>", size(n))?;
    }
    write!(
        out,
        "<tr><td>limit of chunk buffers<td class=\"n\">{}</tr></table>",
        ByteSize(server.limits.store_bytes())
    )?;
    let counts = &server.versions.corruption;
    let wrong = [&counts.changed, &counts.corrupt, &counts.missing, &counts.tables]
        .map(|n| n.load(std::sync::atomic::Ordering::Relaxed));
    write!(
        out,
        "<h2>Origin</h2><table><tr><td>bytes fetched<td class=\"n\">{}</tr><tr><td>fetches failed<td \
            class=\"n\">{}</tr>\
         <tr><td>objects changed, corrupt, missing; tables damaged<td class=\"n\">{}, {}, {}; {}</tr>\
         </table></html>",
        size(s.fetched_bytes),
        s.fetch_errors,
        wrong[0],
        wrong[1],
        wrong[2],
        wrong[3],
    )?;
    Ok(out)
}

/// Writes a warning for each origin that fails now.
fn failing_origins(out: &mut String, server: &Server) -> std::fmt::Result {
    let origins = origin_views(server);
    let failing: Vec<_> = origins.iter().filter(|o| o.state == OriginState::Failing).collect();
    if failing.is_empty() {
        return Ok(());
    }
    write!(
        out,
        "<h2>Failing origins</h2><table class=\"bad\"><tr><th>origin<th>datasets<th>last error</tr>"
    )?;
    for origin in failing.iter().take(ROWS_MAX) {
        let names: Vec<_> = origin.datasets.iter().map(|d| d.as_str()).collect();
        let why = origin.last_error.as_ref().map_or("it does not answer", |e| e.why.as_str());
        write!(
            out,
            "<tr><td><code>{}</code><td>{}<td>{}</tr>",
            escape(&origin.uri),
            escape(&names.join(", ")),
            escape(why)
        )?;
    }
    write!(out, "</table>")
}

/// Writes the datasets: where they lie, how much of each is cached, and what the cache saved.
fn datasets(out: &mut String, server: &Server, principal: &Principal) -> std::fmt::Result {
    write!(
        out,
        "<h2>Datasets</h2><table><tr><th>name<th>objects<th>tables<th>cached<th>delivered<th>from the \
            origin<th>avoided</tr>"
    )?;
    let uses = server.dataset_uses(|domain| *domain == principal.domain);
    let uses: BTreeMap<_, _> = uses.iter().map(|u| (&u.dataset, u)).collect();
    let datasets = server.registrations.list(&principal.domain);
    for d in datasets.iter().map(|e| &e.dataset) {
        let of = |n: fn(&DatasetUse) -> u64| uses.get(&d.name).map_or(0, |u| n(u));
        write!(
            out,
            "<tr><td>{}<td><code>{}</code><td><code>{}</code><td class=\"n\">{}<td class=\"n\">{}<td \
                class=\"n\">{}<td class=\"n\">{}</tr>",
            escape(d.name.as_str()),
            escape(&d.uri),
            escape(&d.tables),
            size(of(|u| u.cached_bytes.unwrap_or(0))),
            size(of(|u| u.delivered_bytes)),
            size(of(|u| u.origin_bytes)),
            size(of(|u| u.avoided_bytes)),
        )?;
    }
    if datasets.is_empty() {
        write!(
            out,
            "<tr><td colspan=\"7\">no dataset is registered: <code>fletch register NAME URI</code></tr>"
        )?;
    }
    write!(out, "</table>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_texts_are_for_people() {
        assert_eq!((size(0), size(1536), size(5 << 30)), ("0 B".into(), "1.5 KiB".into(), "5.0 GiB".into()));
        assert_eq!(escape("<a&\">"), "&lt;a&amp;&quot;&gt;");
    }
}
