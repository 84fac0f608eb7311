//! The table of targets.

use crate::targets::{
    bodies, case, consumption, documents, frames, hits, journal, ledger, log, origin, record, registrations,
    requests, s3, selection, settings, slab, tables, tar, text, trace,
};

/// A parser with its inputs and its promises.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name, as `make fuzz FUZZ_TARGETS=…` takes it.
    pub name: &'static str,
    /// Returns valid inputs, from golden files or made here.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Parses an input and panics if the parser breaks a promise. Returns whether the parser accepted it.
    pub run: fn(&[u8]) -> bool,
    /// The most bytes that an input may make the parser allocate.
    pub memory_max: usize,
}

const MIB: usize = 1 << 20;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "log", seeds: log::seeds, run: log::run, memory_max: MIB },
    Target { name: "ledger", seeds: ledger::seeds, run: ledger::run, memory_max: 16 * MIB },
    Target { name: "trace", seeds: trace::seeds, run: trace::run, memory_max: 16 * MIB },
    Target { name: "registrations", seeds: registrations::seeds, run: registrations::run, memory_max: MIB },
    Target { name: "record", seeds: record::seeds, run: record::run, memory_max: MIB },
    Target { name: "consumption", seeds: consumption::seeds, run: consumption::run, memory_max: MIB },
    Target { name: "documents", seeds: documents::seeds, run: documents::run, memory_max: MIB },
    Target { name: "tables", seeds: tables::seeds, run: tables::run, memory_max: 64 * MIB },
    Target { name: "selection", seeds: selection::seeds, run: selection::run, memory_max: 64 * MIB },
    Target { name: "tar", seeds: tar::seeds, run: tar::run, memory_max: 4 * MIB },
    Target { name: "slab", seeds: slab::seeds, run: slab::run, memory_max: 20 * MIB },
    Target { name: "frames", seeds: frames::seeds, run: frames::run, memory_max: MIB },
    Target { name: "bodies", seeds: bodies::seeds, run: bodies::run, memory_max: 4 * MIB },
    Target { name: "ranges", seeds: text::range_seeds, run: text::run_range, memory_max: MIB },
    Target { name: "names", seeds: text::name_seeds, run: text::run_name, memory_max: MIB },
    Target { name: "settings", seeds: settings::seeds, run: settings::run, memory_max: 16 * MIB },
    Target { name: "tokens", seeds: settings::token_seeds, run: settings::run_tokens, memory_max: 8 * MIB },
    Target { name: "requests", seeds: requests::seeds, run: requests::run, memory_max: 64 * MIB },
    Target { name: "s3", seeds: s3::seeds, run: s3::run, memory_max: MIB },
    Target { name: "hits", seeds: hits::seeds, run: hits::run, memory_max: 4 * MIB },
    Target { name: "origin", seeds: origin::seeds, run: origin::run, memory_max: 16 * MIB },
    Target { name: "journal", seeds: journal::seeds, run: journal::run, memory_max: 4 * MIB },
    Target { name: "case", seeds: case::seeds, run: case::run, memory_max: 160 * MIB },
];

/// Returns the target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|t| t.name == name)
}
