//! The same bytes in other layouts. A root has the same entries in each, so bytes of an entry are
//! found through any of them, whatever its chunks are; who reads them checks what they hash to.

use super::{
    Sources, VersionError, Versions,
    fetch::{ChunkLocation, Located, Piece},
    source::{Row, Source},
};
use fletch_core::Hash;
use fletch_core::manifest::locate::{ChunkRange, ranges};
use fletch_tables::ObjectRef;
use std::{ops::Range, sync::Arc};

impl Versions {
    /// Where a chunk of this version is: in the layout in use, or in another.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] when it is none of this version's, and others.
    pub async fn locate(&self, sources: &Sources, hash: Hash) -> Result<Located, VersionError> {
        if let Some(row) = sources.first.rows(hash, 1).await?.into_iter().next() {
            return Ok(Located::new(&sources.first, row));
        }
        for fresh in [false, true] {
            for source in self.others(sources, fresh).await.iter().filter(|s| s.registered.stands()) {
                match source.rows(hash, 1).await {
                    Ok(rows) => {
                        if let Some(row) = rows.into_iter().next() {
                            return Ok(Located::new(source, row));
                        }
                    }
                    Err(e) => tracing::debug!(error = %e, "another source cannot be looked into"),
                }
            }
        }
        Err(VersionError::NotFound)
    }

    /// Other chunks that hold bytes `range` of an entry, whole, than the one named.
    pub async fn elsewhere(
        &self,
        sources: &Sources,
        ordinal: u64,
        range: Range<u64>,
        but: Hash,
    ) -> Vec<ChunkRange> {
        let mut found = Vec::new();
        for source in self.others(sources, true).await.iter().filter(|s| s.registered.stands()) {
            let entry = match source.version.entry(ordinal).await {
                Ok(Some(entry)) => entry,
                Ok(None) => continue,
                Err(e) => {
                    tracing::debug!(error = %e, "another source cannot be looked into");
                    continue;
                }
            };
            let mut pieces = ranges(entry.slices(), range.clone());
            if let (Some(one), None) = (pieces.next(), pieces.next())
                && one.slice.chunk != but
            {
                found.push(one);
            }
        }
        found
    }
}

/// The objects that hold, in another layout, the bytes that `row` of `own` places in an entry's
/// object; `None` when it places them in none, or the other layout has the same chunk.
pub(super) async fn spot_of(
    own: &Source,
    row: &Row,
    other: &Arc<Source>,
) -> Result<Option<ChunkLocation>, VersionError> {
    let ObjectRef::Entry { row: entry } = row.row.object else { return Ok(None) };
    let ordinal = own.version.index().first_ordinal(row.part) + u64::from(entry);
    let Some(found) = other.version.entry(ordinal).await? else { return Ok(None) };
    let range = row.row.offset..row.row.offset + u64::from(row.row.len);
    let mut pieces = Vec::new();
    for r in ranges(found.slices(), range) {
        if r.slice.chunk == row.row.chunk {
            return Ok(None);
        }
        let Some(held) = other.rows(r.slice.chunk, 1).await?.into_iter().next() else { return Ok(None) };
        let at = other.at(&held).await?;
        pieces.push(Piece {
            at,
            offset: held.row.offset + r.range.start as u64,
            len: (r.range.end - r.range.start) as u64,
        });
    }
    Ok((!pieces.is_empty()).then_some(ChunkLocation { pieces }))
}
