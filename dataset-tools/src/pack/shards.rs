//! The tar shards of a pack, in the first pass: reads each shard for its members.
//!
//! The second pass reads the members once more, so a pack reads shards twice.

use crate::failure::Failure;
use crate::run::Counters;
use crate::source::content::Content;
use crate::source::outage::OutageJudge;
use crate::source::pin::{origin_pin, pin_row};
use fletch_core::Hash;
use fletch_core::manifest::SLICE_BYTES_DEFAULT;
use fletch_core::manifest::tar::shard::{ShardMember, Sharded, Sharder};
use fletch_origin::Origin;
use fletch_tables::PinRow;
use futures::{StreamExt, stream};
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Handle;

/// The most ranges of one shard that are read at once.
const READS_MAX: usize = 8;

/// Reads shards.
pub struct ShardReader<'a> {
    /// The runtime on which it waits for the origin.
    pub rt: &'a Handle,
    /// Where the dataset is.
    pub source: &'a Origin,
    /// The numbers of the run.
    pub counters: &'a Counters,
    /// Tells faults from outages.
    pub judge: &'a OutageJudge<'a>,
}

/// What a file named like a shard is.
pub enum ShardScan {
    /// A shard: its hashes, and each member with its offset.
    Shard(Content, Vec<(ShardMember, u64)>),
    /// A plain file, and why it is not a shard.
    Plain(String),
    /// A fault: why the file cannot be read.
    Fault(String),
}

impl ShardReader<'_> {
    /// Reads a file under its pin.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on.
    pub fn read(&self, path: &str, pin: &PinRow) -> Result<ShardScan, Failure> {
        self.rt.block_on(async {
            let step = u64::from(SLICE_BYTES_DEFAULT);
            let local = self.source.local_dir().is_some();
            let mut sharder = Sharder::new(SLICE_BYTES_DEFAULT);
            let mut reads = stream::iter(0..pin.size.div_ceil(step))
                .map(|i| {
                    let range = i * step..((i + 1) * step).min(pin.size);
                    async move { self.source.get(path, Some(range), Some(&origin_pin(pin))).await }
                })
                .buffered(READS_MAX);
            while let Some(read) = reads.next().await {
                let got = match read {
                    Ok(got) if local && pin_row(got.meta.pin()) != *pin => {
                        return Ok(ShardScan::Fault(changed()));
                    }
                    Ok(got) => got,
                    Err(e) => return Ok(ShardScan::Fault(self.judge.judge(e).await?)),
                };
                self.judge.read(path, pin.size);
                self.counters.bytes_read.fetch_add(got.bytes.len() as u64, Relaxed);
                let fed = tokio::task::spawn_blocking(move || {
                    let fed = sharder.feed(&got.bytes);
                    (sharder, fed)
                });
                let (back, fed) =
                    fed.await.map_err(|e| Failure::new(format!("hashing {path} failed: {e}")))?;
                sharder = back;
                if let Err(bad) = fed {
                    return Ok(ShardScan::Plain(bad.to_string()));
                }
            }
            Ok(match sharder.finish() {
                Ok(shard) => locate(shard),
                Err(bad) => ShardScan::Plain(bad.to_string()),
            })
        })
    }
}

fn changed() -> String {
    "it changed during the run; stop the program that writes to it and run again".into()
}

/// Finds the offset of each member in the shard: the first run of the shard's slices with the member's
/// chunks. A run that comes twice has the same bytes both times.
fn locate(shard: Sharded) -> ShardScan {
    let Sharded { hash, slices, mut members, .. } = shard;
    let mut starts: HashMap<Hash, Vec<(usize, u64)>> = HashMap::new();
    let mut at = 0;
    for (i, s) in slices.iter().enumerate() {
        starts.entry(s.chunk).or_default().push((i, at));
        at += u64::from(s.len);
    }
    let begin = |m: &ShardMember| {
        let Some(first) = m.slices.first() else { return Some(0) };
        let same = |i: usize| {
            let run = slices.get(i..i + m.slices.len());
            run.is_some_and(|run| run.iter().zip(&m.slices).all(|(a, b)| a.chunk == b.chunk))
        };
        let (_, at) = starts.get(&first.chunk)?.iter().find(|(i, _)| same(*i))?;
        Some(at + u64::from(first.chunk_offset))
    };
    let offsets: Option<Vec<u64>> = members.iter().map(begin).collect();
    match offsets {
        Some(offsets) => {
            let members = members.drain(..).zip(offsets).collect();
            ShardScan::Shard(Content { hash, slices, ..Content::whole(hash, 0) }, members)
        }
        None => ShardScan::Fault("the slices of its members are not slices of the file".into()),
    }
}
