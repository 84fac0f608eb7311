//! The metric families of drafts: what is known of them, and their seals.

use super::page::{MetricsError, Page};
use crate::app::server::Server;

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
    page.counter(
        "fletch_seal_read_bytes_total",
        "Bytes that ended seals read from origins",
        &[],
        &[(vec![], seals.bytes_read)],
    )
}
