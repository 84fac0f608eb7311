//! The metric families of drafts: what is known of them, and their seals.

use super::{
    DATASETS_MAX,
    page::{MetricsError, Page},
};
use crate::app::server::Server;
use std::collections::BTreeSet;

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
    let names: BTreeSet<_> = failed.iter().map(|of| of.dataset.as_str()).collect();
    let rows: Vec<_> = names.into_iter().take(DATASETS_MAX).map(|name| (vec![name], 1)).collect();
    page.gauge(
        "fletch_refresh_failed",
        "1 for a dataset whose last listing or seal at this server failed or was blocked",
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
