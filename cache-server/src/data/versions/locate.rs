//! Locates chunks and entries of a root in the layout in use, and in the root's other layouts.
//!
//! Every layout of a root has the same entries. So bytes of an entry can be found through any layout,
//! whatever its chunks are. The tables are only claims: the reader of the bytes checks their hash.
//!
//! Tables are asked for like chunks: another source answers while the home of the first one does not.

use super::{
    Sources, VersionError, Versions,
    location::{ChunkLocation, LocatedChunk, ObjectPiece},
    race::{Candidate, Choices, Finish, Found, race},
    source::{PartRow, Source},
};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{
    Hash, LayoutId,
    manifest::locate::{ChunkRange, ranges},
};
use fletch_tables::ObjectRef;
use futures::future::{BoxFuture, FutureExt as _};
use parking_lot::Mutex;
use std::{ops::Range, sync::Arc};

/// Asks a source for something that its tables say.
pub type AskTables<T> = Box<dyn Fn(Arc<Source>) -> BoxFuture<'static, Result<T, VersionError>> + Send + Sync>;

/// The sources of a root, asked for something that their tables say.
struct TableChoices<'a, T> {
    versions: &'a Arc<Versions>,
    sources: &'a Sources,
    layout: Option<LayoutId>,
    seen: Mutex<Vec<Arc<Source>>>,
    ask: AskTables<T>,
}

impl<T: Send> Choices for TableChoices<'_, T> {
    type Key = Arc<Source>;
    type Value = T;

    fn ask(&self, source: &Arc<Source>) -> BoxFuture<'static, Result<T, VersionError>> {
        (self.ask)(Arc::clone(source))
    }

    fn probe(&self, source: &Arc<Source>) -> BoxFuture<'static, ()> {
        let source = Arc::clone(source);
        async move { source.probe_tables().await }.boxed()
    }

    fn more(&self, fresh: bool) -> BoxFuture<'_, Found<Arc<Source>>> {
        async move {
            let seen = || self.seen.lock();
            let known = seen().clone();
            let new = self.versions.new_sources(self.sources, fresh, &known).await;
            seen().extend(new.sources.iter().cloned());
            let fits = |s: &Arc<Source>| self.layout.is_none_or(|l| s.version.layout() == l);
            let candidates = new.sources.into_iter().filter(fits).map(candidate).collect();
            Found { candidates, all: new.all }
        }
        .boxed()
    }
}

fn candidate(source: Arc<Source>) -> Candidate<Arc<Source>> {
    Candidate { home: Arc::clone(source.tables.home()), key: source }
}

impl Versions {
    /// Asks the sources of a root, one after another, for something that their tables say.
    ///
    /// The source in use is asked first. With a `layout`, only sources of that layout are asked. Returns the
    /// answer and the source that gave it.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if every source says so; those of the tables.
    pub async fn ask_tables<T: Send>(
        self: &Arc<Self>,
        sources: &Sources,
        layout: Option<LayoutId>,
        ask: AskTables<T>,
    ) -> Result<(Arc<Source>, T), VersionError> {
        let first = &sources.first;
        let fits = layout.is_none_or(|l| first.version.layout() == l);
        let ready = if fits { vec![candidate(Arc::clone(first))] } else { Vec::new() };
        let seen = Mutex::new(if fits { vec![Arc::clone(first)] } else { Vec::new() });
        let choices = TableChoices { versions: self, sources, layout, seen, ask };
        let Finish { won, failed, .. } =
            race(&self.homes, &self.tasks, &choices, ready, self.call_deadline()).await;
        if let Some(won) = won {
            return Ok(won);
        }
        let (outages, others): (Vec<_>, Vec<_>) = failed.into_iter().partition(|(_, e)| e.is_outage());
        let damage = others.into_iter().map(|(_, e)| e).reduce(VersionError::or);
        Err(VersionError::of_outages(&outages).or(damage).unwrap_or(VersionError::NotFound))
    }

    /// Locates a chunk of a version: in the layout in use, or in another.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if the version has no such chunk; those of the tables.
    pub async fn locate(
        self: &Arc<Self>,
        sources: &Sources,
        hash: Hash,
    ) -> Result<LocatedChunk, VersionError> {
        if let Some(Some(row)) = sources.first.try_row(hash) {
            return Ok(LocatedChunk::new(&sources.first, row));
        }
        let row_of: AskTables<PartRow> = Box::new(move |source| {
            async move { source.rows(hash, 1).await?.into_iter().next().ok_or(VersionError::NotFound) }
                .boxed()
        });
        let (source, row) = pass_gate(Gate::Tables, self.ask_tables(sources, None, row_of)).await?;
        Ok(LocatedChunk::new(&source, row))
    }

    /// Returns other chunks than `except` that hold all of bytes `range` of an entry, from other sources.
    pub async fn other_locations(
        self: &Arc<Self>,
        sources: &Sources,
        ordinal: u64,
        range: Range<u64>,
        except: Hash,
    ) -> Vec<ChunkRange> {
        let mut found = Vec::new();
        let first = [Arc::clone(&sources.first)];
        for source in self.new_sources(sources, true, &first).await.sources {
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
    Ok((!pieces.is_empty()).then_some(ChunkLocation::new(other, pieces)))
}
