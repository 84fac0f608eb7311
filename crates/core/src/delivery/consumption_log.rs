//! Consumption logs: the samples that a consumer recorded, and their comparison with a receipt
//! (`docs/FORMATS-epochs.md`, "Consumption logs").
//!
//! I1. Only sum and count decide whether logs agree with a receipt. The discrepancies that a check names
//!     explain a difference; they prove nothing.
//! I2. With a ledger, a record counts only if the ledger has its position as acknowledged. Otherwise the
//!     consumer died before its ack, or the epoch was rolled back, and the sample was delivered again.

use super::{
    event::Event,
    ledger::Ledger,
    receipt::{Delivery, LtHash, Receipt},
    reclaim::RECLAIMED,
};
use crate::{Hash, Root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// The first word of a consumption log.
pub const MAGIC: &str = "fletch.notes";
/// The format's major version.
pub const FORMAT_MAJOR: u32 = 1;

/// One consumed sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumptionRecord {
    /// The received copy.
    pub delivery: Delivery,
    /// Its lease, and its position in the lease, from 0; `None` if the consumer did not record them.
    pub at: Option<(u64, u32)>,
}

impl fmt::Display for ConsumptionRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { ordinal, content, copy } = self.delivery;
        write!(f, "{ordinal} {copy} {content}")?;
        self.at.map_or(Ok(()), |(lease, place)| write!(f, " {lease} {place}"))
    }
}

/// The records of one consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumptionLog {
    /// The version that was delivered.
    pub root: Root,
    /// The epoch's number.
    pub epoch: u64,
    /// The consumed samples, each with the number of its line, from 1.
    pub records: Vec<(usize, ConsumptionRecord)>,
    /// Deliveries that the consumer added up already: their number and their sum.
    pub sums: Vec<(u64, LtHash)>,
}

/// Why a consumption log cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct BadConsumptionLog {
    /// The number of the line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Returns the first line of a consumption log, without its newline.
#[must_use]
pub fn head(root: Root, epoch: u64) -> String {
    format!("{MAGIC} {FORMAT_MAJOR} {root} {epoch}")
}

/// Returns the line for deliveries that were added up, without its newline.
#[must_use]
pub fn sum(deliveries: u64, value: &LtHash) -> String {
    format!("sum {deliveries} {}", hex::encode(value.to_bytes()))
}

impl ConsumptionLog {
    /// Reads a log. Ignores what follows the last newline: a crash tore that line before it was acknowledged.
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
                return Err(BadConsumptionLog {
                    line: 1,
                    why: "its format is newer than this build reads; use a newer build",
                });
            }
            _ => {
                return Err(BadConsumptionLog {
                    line: 1,
                    why: "not a consumption log: it does not begin with `fletch.notes`",
                });
            }
        };
        let (Some(root), Some(epoch)) = (root, epoch) else {
            return Err(BadConsumptionLog { line: 1, why: "the first line has no readable root and epoch" });
        };
        let mut out = ConsumptionLog { root, epoch, records: Vec::new(), sums: Vec::new() };
        for (line, words) in lines {
            let bad = |why| BadConsumptionLog { line, why };
            match words[..] {
                [first, ..] if first.starts_with('#') => {}
                ["sum", n, value] => {
                    let value = hex::decode(value).ok().and_then(|v| LtHash::from_bytes(&v));
                    let sum = n.parse().ok().zip(value).ok_or(bad("the sum cannot be read"))?;
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
                    let record = delivery().zip(at).map(|(delivery, at)| ConsumptionRecord { delivery, at });
                    out.records.push((line, record.ok_or(bad("the sample cannot be read"))?));
                }
                _ => return Err(bad("the line is neither a sample nor a sum nor a remark")),
            }
        }
        Ok(out)
    }
}

/// The position of a record in a set of logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPosition {
    /// The index of the log, from 0.
    pub file: usize,
    /// The number of the line, from 1.
    pub line: usize,
}

/// One reason why logs do not agree with a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discrepancy {
    /// The same copy of a sample was consumed twice.
    Doubled {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
        /// The number of the copy.
        copy: u32,
        /// Its first record.
        first: LogPosition,
        /// Its second record.
        again: LogPosition,
    },
    /// The consumed bytes are not those of the version.
    Altered {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
        /// Its record.
        at: LogPosition,
        /// The hash of the consumed bytes.
        is: Hash,
        /// The version's hash of the sample; `None` when the version has no such sample.
        should: Option<Hash>,
    },
    /// No log has the sample.
    Missing {
        /// The ordinal of the sample's first entry.
        ordinal: u64,
    },
    /// The ledger has the entry as acknowledged, and no log has it.
    Unrecorded {
        /// The plan entry.
        entry: u32,
        /// The rank that acknowledged it.
        rank: u32,
        /// Its lease.
        lease: u64,
        /// Its position in the lease, from 0.
        place: u32,
    },
}

/// A lease at the end of a ledger.
#[derive(Debug, Clone)]
struct LeaseRecord {
    rank: u32,
    entries: Vec<u32>,
    acked: u32,
}

/// Returns the leases at the end of a ledger, with what of them is acknowledged after all rollbacks.
///
/// Returns `None` when the ledger begins with a state or was restored: neither names all leases.
fn lease_records(ledger: &Ledger) -> Option<BTreeMap<u64, LeaseRecord>> {
    let mut leases: BTreeMap<u64, LeaseRecord> = BTreeMap::new();
    // Undo log: for every change of a lease, what was acknowledged of it before; and where each commit is in
    // it.
    let mut log: Vec<(u64, u32)> = Vec::new();
    let mut commits: Vec<(u64, usize)> = Vec::new();
    for event in &ledger.events {
        match event {
            Event::Resume { .. } => return None,
            Event::Grant { request, .. } if request.worker == RECLAIMED => return None,
            Event::Grant { lease, request, entries } => {
                let granted = LeaseRecord { rank: request.rank, entries: entries.clone(), acked: 0 };
                let before = leases.insert(*lease, granted);
                log.extend(before.map(|b| (*lease, b.acked)));
            }
            Event::Ack { lease, upto } => {
                if let Some(record) = leases.get_mut(lease).filter(|r| r.acked < *upto) {
                    log.push((*lease, record.acked));
                    record.acked = *upto;
                }
            }
            Event::Commit { commit } => {
                commits.push((*commit, log.len()));
            }
            Event::Rollback { commit } => {
                // As in `Leases`, a rollback deletes later commits, so each change is undone once.
                let at = commits.iter().rposition(|c| c.0 == *commit)?;
                commits.truncate(at + 1);
                for (lease, acked) in log.drain(commits[at].1..).rev() {
                    if let Some(record) = leases.get_mut(&lease) {
                        record.acked = acked;
                    }
                }
            }
            _ => {}
        }
    }
    Some(leases)
}

/// The records of all consumers of an epoch, as far as they count.
#[derive(Debug)]
pub struct Check {
    records: Vec<(LogPosition, ConsumptionRecord)>,
    leases: Option<BTreeMap<u64, LeaseRecord>>,
    deliveries: u64,
    left_out: u64,
    value: LtHash,
    /// Whether a log has sums, which do not name samples.
    summed: bool,
}

impl Check {
    /// Adds up the records of all consumers. With a ledger, leaves out those that it does not have as
    /// acknowledged.
    #[must_use]
    pub fn new(files: &[ConsumptionLog], ledger: Option<&Ledger>) -> Self {
        let leases = ledger.and_then(lease_records);
        let mut check = Check {
            records: Vec::new(),
            leases,
            deliveries: 0,
            left_out: 0,
            value: LtHash::default(),
            summed: false,
        };
        for (file, log) in files.iter().enumerate() {
            for (deliveries, value) in &log.sums {
                check.summed = true;
                check.deliveries = check.deliveries.saturating_add(*deliveries);
                check.value.merge(value);
            }
            for (line, record) in &log.records {
                let unacked = |leases: &BTreeMap<u64, LeaseRecord>, (lease, place): (u64, u32)| {
                    leases.get(&lease).is_none_or(|l| place >= l.acked)
                };
                if check.leases.as_ref().zip(record.at).is_some_and(|(leases, at)| unacked(leases, at)) {
                    check.left_out += 1;
                    continue;
                }
                check.deliveries = check.deliveries.saturating_add(1);
                check.value.add(log.root, &record.delivery);
                check.records.push((LogPosition { file, line: *line }, *record));
            }
        }
        check
    }

    /// Returns how many deliveries count.
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.deliveries
    }

    /// Returns how many records do not count: consumed and never acknowledged, or rolled back.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Returns the sum of the deliveries that count.
    #[must_use]
    pub fn value(&self) -> &LtHash {
        &self.value
    }

    /// Returns whether exactly what the receipt states was consumed.
    #[must_use]
    pub fn agrees(&self, receipt: &Receipt) -> bool {
        receipt.agrees(self.deliveries, &self.value)
    }

    /// Returns the discrepancies that explain why logs and receipt do not agree.
    ///
    /// `contents` are the content hashes of the version's samples, by the ordinal of their first entry. `all`
    /// is set if the plan has each sample once: the numbers of the samples that the tail rule dropped.
    #[must_use]
    pub fn discrepancies(
        &self,
        contents: &BTreeMap<u64, Hash>,
        all: Option<&BTreeSet<u64>>,
    ) -> Vec<Discrepancy> {
        let mut out = Vec::new();
        let mut seen: BTreeMap<(u64, u32), LogPosition> = BTreeMap::new();
        for (at, record) in &self.records {
            let Delivery { ordinal, content, copy } = record.delivery;
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
            // A sum does not name its samples, so no sample can be called missing.
            return out;
        }
        if let (Some(leases), true) = (&self.leases, self.records.iter().all(|(_, r)| r.at.is_some())) {
            let recorded: BTreeSet<(u64, u32)> = self.records.iter().filter_map(|(_, r)| r.at).collect();
            for (&lease, l) in leases {
                for (place, &entry) in (0..l.acked).zip(&l.entries) {
                    if !recorded.contains(&(lease, place)) {
                        out.push(Discrepancy::Unrecorded { entry, rank: l.rank, lease, place });
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
