//! What lies at a tables location and serves nobody: versions that no tag, mount or job names, and chunks of
//! packs that no version has.
//!
//! Invariants:
//! 1. A version that is in use stays, and so do all chunks that a version which stays has.
//! 2. If the tables of a version that stays cannot be read, nothing is deleted.
//! 3. The documents of layouts go first, then the manifest. So a version that is deleted in part has no
//!    layout, nobody finds it, and the next run deletes the rest.

use crate::failure::Failure;
use crate::tables_location::{TablesLocation, remove_empty_dirs};
use fletch_core::manifest::LayoutKind;
use fletch_core::{Hash, Root};
use fletch_origin::{Origin, OriginError};
use fletch_tables::documents::rfc3339;
use fletch_tables::{ObjectRef, paths};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Objects that are deleted at once.
const DELETES_AT_ONCE: usize = 16;

/// What is in use, and how long other versions stay.
#[derive(Debug)]
pub struct Keep {
    /// The roots of the versions in use.
    pub in_use: BTreeSet<Root>,
    /// For how long a version stays after the next one was made.
    pub unused_for: Duration,
    /// Now, in nanoseconds since 1970.
    pub now_ns: u64,
}

/// A version and its files.
#[derive(Debug, Clone, Serialize)]
pub struct StoredVersion {
    pub root: Root,
    /// Since when no tag can have named it, as far as the times of the files show.
    pub unused_since: String,
    /// The number of its files.
    pub files: u64,
    /// The bytes of its files.
    pub bytes: u64,
    #[serde(skip)]
    unused_ns: u64,
    #[serde(skip)]
    written_ns: u64,
    #[serde(skip)]
    paths: Vec<String>,
}

/// What nobody uses.
#[derive(Debug, Default, Serialize)]
pub struct Garbage {
    /// The versions, the oldest first.
    pub versions: Vec<StoredVersion>,
    /// The number of chunks of packs.
    pub chunks: u64,
    /// The bytes of these chunks.
    pub chunk_bytes: u64,
    /// The number of versions that stay.
    pub kept_versions: u64,
    #[serde(skip)]
    chunk_paths: Vec<String>,
}

impl Garbage {
    /// Finds it.
    ///
    /// # Errors
    /// [`Failure`] if something cannot be listed, or the tables of a version that stays cannot be read.
    pub async fn find(location: &TablesLocation, keep: &Keep) -> Result<Self, Failure> {
        let mut garbage = Garbage::default();
        let mut kept = Vec::new();
        for version in stored_versions(location.origin(), keep.now_ns).await? {
            if keep.in_use.contains(&version.root) || keep.is_young(version.unused_ns) {
                kept.push(version.root);
            } else {
                garbage.versions.push(version);
            }
        }
        garbage.kept_versions = kept.len() as u64;
        garbage.find_chunks(location, keep, &kept).await?;
        Ok(garbage)
    }

    async fn find_chunks(
        &mut self,
        location: &TablesLocation,
        keep: &Keep,
        kept: &[Root],
    ) -> Result<(), Failure> {
        let mut objects = location.origin().list(paths::CHUNKS).peekable();
        if std::pin::Pin::new(&mut objects).peek().await.is_none() {
            return Ok(());
        }
        let mut used = HashSet::new();
        for &root in kept {
            let read = chunks_of(location, root, &mut used).await;
            read.map_err(|e| Failure {
                what: format!("{}; nothing was deleted, because version {root} stays", e.what),
                ..e
            })?;
        }
        while let Some(object) = objects.try_next().await? {
            let name = object.path.rsplit('/').next().unwrap_or_default();
            let Ok(hash) = name.parse::<Hash>() else { continue };
            let is_own = object.path == paths::chunk(hash);
            if is_own && !used.contains(&hash) && !keep.is_young(written_ns(object.mtime_ns, keep.now_ns)) {
                self.chunks += 1;
                self.chunk_bytes += object.size;
                self.chunk_paths.push(object.path);
            }
        }
        Ok(())
    }

    /// The bytes that its deletion frees.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.chunk_bytes + self.versions.iter().map(|version| version.bytes).sum::<u64>()
    }

    /// The number of its files.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.chunks + self.versions.iter().map(|version| version.files).sum::<u64>()
    }

    /// Deletes it. Counts the files that were deleted in `deleted`.
    ///
    /// # Errors
    /// [`Failure`] if a file cannot be deleted. What was not deleted is found again.
    pub async fn delete(&self, location: &TablesLocation, deleted: &AtomicU64) -> Result<(), Failure> {
        let origin = location.origin();
        for version in &self.versions {
            let manifest = paths::manifest(version.root);
            let (documents, tables): (Vec<&String>, Vec<&String>) =
                version.paths.iter().partition(|path| is_json(path));
            let (manifests, layouts): (Vec<&String>, Vec<&String>) =
                documents.into_iter().partition(|path| **path == manifest);
            for some in [layouts, manifests, tables] {
                delete_all(origin, &some, deleted).await?;
            }
        }
        delete_all(origin, &self.chunk_paths.iter().collect::<Vec<_>>(), deleted).await
    }
}

impl Keep {
    fn is_young(&self, since_ns: u64) -> bool {
        u128::from(self.now_ns.saturating_sub(since_ns)) < self.unused_for.as_nanos()
    }
}

fn is_json(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "json")
}

/// A file without a time counts as new.
fn written_ns(mtime_ns: Option<i64>, now_ns: u64) -> u64 {
    mtime_ns.map_or(now_ns, |at| u64::try_from(at).unwrap_or(0))
}

/// Lists the versions, also those that were written in part, the oldest first.
///
/// # Errors
/// [`Failure`] if they cannot be listed.
pub async fn stored_versions(origin: &Origin, now_ns: u64) -> Result<Vec<StoredVersion>, Failure> {
    let mut versions: BTreeMap<Root, StoredVersion> = BTreeMap::new();
    let mut files = origin.list(paths::VERSIONS);
    while let Some(file) = files.try_next().await? {
        let rest = file.path.strip_prefix(paths::VERSIONS).unwrap_or_default();
        let Some(Ok(root)) = rest.split('/').next().map(str::parse::<Root>) else { continue };
        let version = versions.entry(root).or_insert_with(|| StoredVersion {
            root,
            unused_since: String::new(),
            files: 0,
            bytes: 0,
            unused_ns: 0,
            written_ns: 0,
            paths: Vec::new(),
        });
        version.files += 1;
        version.bytes += file.size;
        version.written_ns = version.written_ns.max(written_ns(file.mtime_ns, now_ns));
        version.paths.push(file.path);
    }
    let mut versions: Vec<StoredVersion> = versions.into_values().collect();
    versions.sort_by_key(|version| version.written_ns);
    // A tag went from each version to the next one at the earliest when that was written.
    for i in 0..versions.len() {
        let next =
            versions[i + 1..].iter().map(|later| later.written_ns).find(|at| *at > versions[i].written_ns);
        versions[i].unused_ns = next.unwrap_or(versions[i].written_ns);
        versions[i].unused_since = rfc3339(versions[i].unused_ns);
    }
    Ok(versions)
}

/// Adds the chunks of a version's packs to `used`.
async fn chunks_of(location: &TablesLocation, root: Root, used: &mut HashSet<Hash>) -> Result<(), Failure> {
    for layout in location.layouts(root).await? {
        if layout.params.kind != LayoutKind::Pack {
            continue;
        }
        let version = location.version(root, layout.layout).await?;
        for part in 0..version.manifest().parts.len() {
            let rows = version.chunk_rows(part).await?;
            used.extend(
                rows.iter().filter(|row| matches!(row.object, ObjectRef::Key(_))).map(|row| row.chunk),
            );
        }
    }
    Ok(())
}

async fn delete_all(origin: &Origin, paths: &[&String], deleted: &AtomicU64) -> Result<(), Failure> {
    let deletes = stream::iter(paths).map(|path| async move {
        origin.delete(path).await?;
        remove_empty_dirs(origin, path);
        deleted.fetch_add(1, Relaxed);
        Ok::<_, OriginError>(())
    });
    Ok(deletes.buffer_unordered(DELETES_AT_ONCE).try_collect().await?)
}
