//! Tar shards of a dataset that is packed: read once for what is in them, before the members are
//! grouped, and so read twice in all.

use crate::failure::Failure;
use crate::index::content::Content;
use crate::index::known::{pin_from, row_of};
use crate::index::outcome::Counters;
use fletch_core::Hash;
use fletch_core::manifest::SLICE_BYTES_DEFAULT;
use fletch_core::manifest::tar::shard::{ShardMember, Sharded, Sharder};
use fletch_origin::{Origin, OriginError};
use fletch_tables::PinRow;
use futures::{StreamExt, stream};
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Handle;

/// Ranges of one shard that are read at once.
const READS_MAX: usize = 8;

/// Reads shards.
pub struct ShardReader<'a> {
    /// Where it waits.
    pub rt: &'a Handle,
    /// Where the dataset is.
    pub source: &'a Origin,
    /// What was read.
    pub counters: &'a Counters,
}

/// What came of a file that is named like a shard.
pub enum Scanned {
    /// What it is, and where in it each member begins.
    Shard(Content, Vec<(ShardMember, u64)>),
    /// A file like any other, and why.
    Plain(String),
    /// It cannot be read, and why.
    Fault(String),
}

impl ShardReader<'_> {
    /// Reads a shard as it was when it was found.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on.
    pub fn read(&self, path: &str, pin: &PinRow) -> Result<Scanned, Failure> {
        self.rt.block_on(async {
            let step = u64::from(SLICE_BYTES_DEFAULT);
            let local = self.source.local_dir().is_some();
            let mut sharder = Sharder::new(SLICE_BYTES_DEFAULT);
            let mut reads = stream::iter(0..pin.size.div_ceil(step))
                .map(|i| {
                    let range = i * step..((i + 1) * step).min(pin.size);
                    async move { self.source.get(path, Some(range), Some(&pin_from(pin))).await }
                })
                .buffered(READS_MAX);
            while let Some(read) = reads.next().await {
                let got = match read {
                    Ok(got) if local && row_of(got.meta.pin()) != *pin => {
                        return Ok(Scanned::Fault(changed()));
                    }
                    Ok(got) => got,
                    Err(e) if e.transient() => return Err(e.into()),
                    Err(OriginError::Changed { .. }) => return Ok(Scanned::Fault(changed())),
                    Err(e) => return Ok(Scanned::Fault(e.to_string())),
                };
                self.counters.bytes_read.fetch_add(got.bytes.len() as u64, Relaxed);
                let fed = tokio::task::spawn_blocking(move || {
                    let fed = sharder.feed(&got.bytes);
                    (sharder, fed)
                });
                let (back, fed) =
                    fed.await.map_err(|e| Failure::new(format!("hashing {path} failed: {e}")))?;
                sharder = back;
                if let Err(bad) = fed {
                    return Ok(Scanned::Plain(bad.to_string()));
                }
            }
            Ok(match sharder.finish() {
                Ok(shard) => placed(shard),
                Err(bad) => Scanned::Plain(bad.to_string()),
            })
        })
    }
}

fn changed() -> String {
    "it changed after it was found; stop what writes to it and run again".into()
}

/// Finds where in the shard each member begins: a run of chunks that is the member's. Where the
/// same run comes twice its bytes are the same.
fn placed(shard: Sharded) -> Scanned {
    let Sharded { hash, slices, mut members } = shard;
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
            Scanned::Shard(Content { hash, slices, ..Content::whole(hash, 0) }, members)
        }
        None => Scanned::Fault("its members lie in none of its chunks".into()),
    }
}
