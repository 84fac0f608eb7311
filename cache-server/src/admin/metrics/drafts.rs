//! The metric families of drafts: what is known of them, and their seals.

use super::{
    DATASETS_MAX,
    page::{MetricsError, Page},
};
use crate::app::server::Server;
use std::{cmp::Reverse, collections::BTreeMap};

/// Adds the families.
pub(super) fn families(page: &Page, server: &Server) -> Result<(), MetricsError> {
    let (learned, refused) = server.versions.learned().counts();
    page.gauge("fletch_learned_names", "Names of drafts whose content is known", &[], &[(vec![], learned)])?;
    page.counter(
        "fletch_learned_names_refused_total",
        "Names of drafts that found no room",
        &[],
        &[(vec![], refused)],
    )?;
    let (known, unknown) = server.seals.known_bytes();
    page.gauge(
        "fletch_draft_bytes",
        "Bytes of the drafts in use, by whether the server has read them",
        &["known"],
        &[(vec!["true"], known), (vec!["false"], unknown)],
    )?;
    let seals = server.seals.stats();
    page.gauge("fletch_seals", "Seals of drafts that wait or run", &[], &[(vec![], seals.running)])?;
    page.counter(
        "fletch_seals_total",
        "Seals of drafts that ended, by their outcome",
        &["result"],
        &[(vec!["done"], seals.done), (vec!["blocked"], seals.blocked), (vec!["failed"], seals.failed)],
    )?;
    let failed = [server.listings.failed(), server.seals.failed()].concat();
    let registered = server.registrations.all();
    let names = registered.iter().map(|entry| (&entry.dataset.name, 0));
    let names: BTreeMap<_, u64> = names.chain(failed.iter().map(|of| (&of.dataset, 1))).collect();
    let mut rows: Vec<_> = names.into_iter().map(|(name, failed)| (vec![name.as_str()], failed)).collect();
    // Those that failed are named even where there are too many datasets.
    rows.sort_by_key(|(_, failed)| Reverse(*failed));
    rows.truncate(DATASETS_MAX);
    page.gauge(
        "fletch_refresh_failed",
        "Whether the last listing or seal of a dataset at this server failed or was blocked",
        &["dataset"],
        &rows,
    )?;
    page.counter(
        "fletch_seal_read_bytes_total",
        "Bytes that ended seals read from origins",
        &[],
        &[(vec![], seals.bytes_read)],
    )
}
