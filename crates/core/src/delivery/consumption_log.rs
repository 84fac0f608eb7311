//! What a consumer wrote down of an epoch, and what of it a receipt does not bear out (`docs/FORMATS-epochs.md`, "Notes").
//!
//! I1. Notes agree with a receipt only by its value and its count: what is named besides explains a difference and
//!     proves nothing.
//! I2. Where the ledger is at hand, a note whose place it does not have as acknowledged does not count: its consumer died
//!     before its ack, or the model was rolled back, and the sample was delivered again.

use super::{
    ledger::{Event, Ledger},
    receipt::{Delivery, LtHash, Receipt},
};
use crate::{Hash, Root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// The first word of a file of notes.
pub const MAGIC: &str = "fletch.notes";
/// The format's major version.
pub const FORMAT_MAJOR: u32 = 1;

/// One consumed sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumptionRecord {
    /// What was received.
    pub delivery: Delivery,
    /// The lease it came in, and its place there from 0, where its consumer wrote that down.
    pub at: Option<(u64, u32)>,
}

impl fmt::Display for ConsumptionRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { ordinal, content, copy } = self.delivery;
        write!(f, "{ordinal} {copy} {content}")?;
        self.at.map_or(Ok(()), |(lease, place)| write!(f, " {lease} {place}"))
    }
}

/// All that one consumer wrote down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumptionLog {
    /// The version that was delivered from.
    pub root: Root,
    /// Of which epoch.
    pub epoch: u64,
    /// Each with the number of its line, from 1.
    pub notes: Vec<(usize, ConsumptionRecord)>,
    /// Deliveries that were added up already.
    pub sums: Vec<(u64, LtHash)>,
}

/// Why a file of notes cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct BadConsumptionLog {
    /// Which line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: &'static str,
}

/// The first line of a file of notes, without its end.
#[must_use]
pub fn head(root: Root, epoch: u64) -> String {
    format!("{MAGIC} {FORMAT_MAJOR} {root} {epoch}")
}

/// The line that stands for deliveries that were added up, without its end.
#[must_use]
pub fn sum(deliveries: u64, value: &LtHash) -> String {
    format!("sum {deliveries} {}", hex::encode(value.to_bytes()))
}

impl ConsumptionLog {
    /// Reads a file. What follows its last line's end is a line that a crash tore, and was never acknowledged.
    ///
    /// # Errors
    /// [`BadConsumptionLog`].
    pub fn parse(text: &str) -> Result<Self, BadConsumptionLog> {
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut lines = (1..).zip(whole.split('\n').map(|l| l.split(' ').collect::<Vec<_>>()));
        let first = lines.next().map(|l| l.1).unwrap_or_default();
        let (root, epoch) = match first[..] {
            [MAGIC, "1", root, epoch] => (root.parse().ok(), epoch.parse().ok()),
            [MAGIC, _, ..] => {
                return Err(BadConsumptionLog { line: 1, why: "a newer format than this build reads" });
            }
            _ => return Err(BadConsumptionLog { line: 1, why: "it does not begin as notes do" }),
        };
        let (Some(root), Some(epoch)) = (root, epoch) else {
            return Err(BadConsumptionLog { line: 1, why: "no root, or no epoch" });
        };
        let mut out = ConsumptionLog { root, epoch, notes: Vec::new(), sums: Vec::new() };
        for (line, words) in lines {
            let bad = |why| BadConsumptionLog { line, why };
            match words[..] {
                [first, ..] if first.starts_with('#') => {}
                ["sum", n, value] => {
                    let value = hex::decode(value).ok().and_then(|v| LtHash::from_bytes(&v));
                    let sum = n.parse().ok().zip(value).ok_or(bad("a sum that cannot be read"))?;
                    out.sums.push(sum);
                }
                [ordinal, copy, content, ref at @ ..] => {
                    let delivery = || {
                        let (ordinal, copy) = (ordinal.parse().ok()?, copy.parse().ok()?);
                        Some(Delivery { ordinal, content: content.parse().ok()?, copy })
                    };
                    let at = match *at {
                        [] => Some(None),
                        [lease, place] => lease.parse().ok().zip(place.parse().ok()).map(Some),
                        _ => None,
                    };
                    let note = delivery().zip(at).map(|(delivery, at)| ConsumptionRecord { delivery, at });
                    out.notes.push((line, note.ok_or(bad("a sample that cannot be read"))?));
                }
                _ => return Err(bad("neither a sample nor a sum")),
            }
        }
        Ok(out)
    }
}

/// Where something is written down: the file's place among those given, and the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPosition {
    /// Which file.
    pub file: usize,
    /// Which line of it.
    pub line: usize,
}

/// Something that explains why notes do not agree with a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discrepancy {
    /// The same copy of a sample was consumed twice.
    Doubled {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
        /// Which copy.
        copy: u32,
        /// Where it stands first.
        first: LogPosition,
        /// Where it stands again.
        again: LogPosition,
    },
    /// Other bytes than the version's were consumed.
    Altered {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
        /// Where it stands.
        at: LogPosition,
        /// What its bytes hash to.
        is: Hash,
        /// What the version says; `None` when it has no such sample.
        should: Option<Hash>,
    },
    /// Nobody wrote it down.
    Missing {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
    },
    /// The ledger has it as acknowledged, and nobody wrote it down.
    Unwritten {
        /// The plan's entry.
        entry: u32,
        /// Who acknowledged it.
        rank: u32,
        /// In which lease.
        lease: u64,
        /// Its place there.
        place: u32,
    },
}

/// A lease as the ledger leaves it.
#[derive(Debug, Clone)]
struct LeaseRecord {
    rank: u32,
    entries: Vec<u32>,
    acked: u32,
}

/// What of a ledger's leases stands; `None` when it goes on from a state, which does not tell leases.
fn told(ledger: &Ledger) -> Option<BTreeMap<u64, LeaseRecord>> {
    let mut leases: BTreeMap<u64, LeaseRecord> = BTreeMap::new();
    // What was acknowledged of a lease before it changed, for every change, and where in that each commit lies.
    let mut log: Vec<(u64, u32)> = Vec::new();
    let mut commits: Vec<(u64, usize)> = Vec::new();
    for event in &ledger.events {
        match event {
            Event::Resume { .. } => return None,
            Event::Grant { lease, request, entries } => {
                let told = LeaseRecord { rank: request.rank, entries: entries.clone(), acked: 0 };
                let before = leases.insert(*lease, told);
                log.extend(before.map(|b| (*lease, b.acked)));
            }
            Event::Ack { lease, upto } => {
                if let Some(told) = leases.get_mut(lease).filter(|t| t.acked < *upto) {
                    log.push((*lease, told.acked));
                    told.acked = *upto;
                }
            }
            Event::Commit { commit } => {
                commits.push((*commit, log.len()));
            }
            Event::Rollback { commit } => {
                // As in `Leases`, commits after it are forgotten: each change is undone once.
                let at = commits.iter().rposition(|c| c.0 == *commit)?;
                commits.truncate(at + 1);
                for (lease, acked) in log.drain(commits[at].1..).rev() {
                    if let Some(told) = leases.get_mut(&lease) {
                        told.acked = acked;
                    }
                }
            }
            _ => {}
        }
    }
    Some(leases)
}

/// Notes of all consumers of an epoch, as far as they count.
#[derive(Debug)]
pub struct Check {
    notes: Vec<(LogPosition, ConsumptionRecord)>,
    told: Option<BTreeMap<u64, LeaseRecord>>,
    deliveries: u64,
    left_out: u64,
    value: LtHash,
    summed: bool,
}

impl Check {
    /// Adds up what consumers wrote down. With a ledger, what it does not have as acknowledged is left out.
    #[must_use]
    pub fn new(files: &[ConsumptionLog], ledger: Option<&Ledger>) -> Self {
        let told = ledger.and_then(told);
        let mut check = Check {
            notes: Vec::new(),
            told,
            deliveries: 0,
            left_out: 0,
            value: LtHash::default(),
            summed: false,
        };
        for (file, notes) in files.iter().enumerate() {
            for (deliveries, value) in &notes.sums {
                check.summed = true;
                check.deliveries = check.deliveries.saturating_add(*deliveries);
                check.value.merge(value);
            }
            for (line, note) in &notes.notes {
                let lost = |told: &BTreeMap<u64, LeaseRecord>, (lease, place): (u64, u32)| {
                    told.get(&lease).is_none_or(|t| place >= t.acked)
                };
                if check.told.as_ref().zip(note.at).is_some_and(|(told, at)| lost(told, at)) {
                    check.left_out += 1;
                    continue;
                }
                check.deliveries = check.deliveries.saturating_add(1);
                check.value.add(notes.root, &note.delivery);
                check.notes.push((LogPosition { file, line: *line }, *note));
            }
        }
        check
    }

    /// Deliveries that count.
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.deliveries
    }

    /// Notes that do not count: consumed and never acknowledged, or rolled back.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// The sum.
    #[must_use]
    pub fn value(&self) -> &LtHash {
        &self.value
    }

    /// Whether exactly what the receipt says was consumed.
    #[must_use]
    pub fn agrees(&self, receipt: &Receipt) -> bool {
        receipt.agrees(self.deliveries, &self.value)
    }

    /// What explains a difference. `contents` are the version's samples by the ordinal of their first entry; `all`: the
    /// plan is each of them once, and `dropped` (sample numbers) was left out.
    #[must_use]
    pub fn differs(&self, contents: &BTreeMap<u64, Hash>, all: Option<&BTreeSet<u64>>) -> Vec<Discrepancy> {
        let mut out = Vec::new();
        let mut seen: BTreeMap<(u64, u32), LogPosition> = BTreeMap::new();
        for (at, note) in &self.notes {
            let Delivery { ordinal, content, copy } = note.delivery;
            match seen.get(&(ordinal, copy)) {
                Some(&first) => out.push(Discrepancy::Doubled { ordinal, copy, first, again: *at }),
                None => drop(seen.insert((ordinal, copy), *at)),
            }
            let should = contents.get(&ordinal).copied();
            if should != Some(content) {
                out.push(Discrepancy::Altered { ordinal, at: *at, is: content, should });
            }
        }
        if self.summed {
            // Who is behind a sum cannot be seen in it.
            return out;
        }
        if let (Some(told), true) = (&self.told, self.notes.iter().all(|(_, n)| n.at.is_some())) {
            let written: BTreeSet<(u64, u32)> = self.notes.iter().filter_map(|(_, n)| n.at).collect();
            for (&lease, t) in told {
                for (place, &entry) in (0..t.acked).zip(&t.entries) {
                    if !written.contains(&(lease, place)) {
                        out.push(Discrepancy::Unwritten { entry, rank: t.rank, lease, place });
                    }
                }
            }
        } else if let Some(dropped) = all {
            for (number, &ordinal) in (0..).zip(contents.keys()) {
                if !dropped.contains(&number) && !seen.contains_key(&(ordinal, 0)) {
                    out.push(Discrepancy::Missing { ordinal });
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
