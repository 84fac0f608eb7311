//! Locates chunks and entries of a root in the layout in use, and in the root's other layouts.
//!
//! Every layout of a root has the same entries. So bytes of an entry can be found through any layout,
//! whatever its chunks are. The tables are only claims: the reader of the bytes checks their hash.

use super::{
    Sources, VersionError, Versions,
    location::{ChunkLocation, LocatedChunk, ObjectPiece},
    source::{PartRow, Source},
};
use fletch_core::{
    Hash,
    manifest::locate::{ChunkRange, ranges},
};
use fletch_tables::ObjectRef;
use std::{ops::Range, sync::Arc};

impl Versions {
    /// Locates a chunk of a version: in the layout in use, or in another.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if the version has no such chunk; those of the tables.
    pub async fn locate(&self, sources: &Sources, hash: Hash) -> Result<LocatedChunk, VersionError> {
        if let Some(row) = sources.first.rows(hash, 1).await?.into_iter().next() {
            return Ok(LocatedChunk::new(&sources.first, row));
        }
        for fresh in [false, true] {
            let others = self.others(sources, fresh).await;
            for source in others.iter().filter(|s| s.registered.is_registered()) {
                match source.rows(hash, 1).await {
                    Ok(rows) => {
                        if let Some(row) = rows.into_iter().next() {
                            return Ok(LocatedChunk::new(source, row));
                        }
                    }
                    Err(e) => tracing::debug!(error = %e, "cannot look for a chunk in another source"),
                }
            }
        }
        Err(VersionError::NotFound)
    }

    /// Returns other chunks than `except` that hold all of bytes `range` of an entry, from other sources.
    pub async fn other_locations(
        &self,
        sources: &Sources,
        ordinal: u64,
        range: Range<u64>,
        except: Hash,
    ) -> Vec<ChunkRange> {
        let mut found = Vec::new();
        for source in self.others(sources, true).await.iter().filter(|s| s.registered.is_registered()) {
            let entry = match source.version.entry(ordinal).await {
                Ok(Some(entry)) => entry,
                Ok(None) => continue,
                Err(e) => {
                    tracing::debug!(error = %e, "cannot look for an entry in another source");
                    continue;
                }
            };
            let mut pieces = ranges(entry.slices(), range.clone());
            if let (Some(one), None) = (pieces.next(), pieces.next())
                && one.slice.chunk != except
            {
                found.push(one);
            }
        }
        found
    }
}

/// Returns the objects of another layout that hold the bytes which `row` of `own` reads from an entry's
/// object.
///
/// `None` if the row reads from no entry's object, or the other layout has the same chunk.
pub(super) async fn location_in_layout(
    own: &Source,
    row: &PartRow,
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
        let object = other.object_of(&held).await?;
        pieces.push(ObjectPiece {
            object,
            offset: held.row.offset + r.range.start as u64,
            len: (r.range.end - r.range.start) as u64,
        });
    }
    Ok((!pieces.is_empty()).then_some(ChunkLocation { pieces }))
}
