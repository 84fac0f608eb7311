//! A tables location: the tags, the versions and the chunks under `fletch/` at a URI.
//!
//! It is the dataset itself, or what `--tables` names.

use crate::failure::{Exit, Failure};
use crate::select::Select;
use crate::source::walk::RESERVED;
use fletch_client::fallback::OriginTables;
use fletch_core::manifest::{LayoutKind, LayoutParams};
use fletch_core::{Kind, LayoutId, Root, TagName};
use fletch_origin::{Origin, OriginError, OriginUri, Origins, PutMode};
use fletch_tables::{LayoutDoc, PartCache, TableError, TagDoc, Version, paths};
use futures::TryStreamExt;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Parts held in memory by one command, in bytes.
const PART_CACHE_BYTES: u64 = 32 << 20;
/// The most tags that an error names.
const TAGS_NAMED_MAX: usize = 8;
/// The most tags or layouts that one listing returns.
const LISTED_MAX: usize = 100_000;

impl From<OriginError> for Failure {
    fn from(e: OriginError) -> Self {
        let exit = match &e {
            OriginError::Denied { .. } | OriginError::Expired { .. } => Exit::Denied,
            OriginError::Unavailable { .. }
            | OriginError::Throttled { .. }
            | OriginError::WrongAnswer { .. } => Exit::Unreachable,
            _ => Exit::Failed,
        };
        Failure::new(e.to_string()).exit(exit).if_full()
    }
}

impl From<TableError> for Failure {
    fn from(e: TableError) -> Self {
        let failure = Failure::of(e.kind(), e.to_string());
        match e.kind() {
            Kind::Corrupt => failure.hint("the tables are damaged; index the dataset again to rewrite them"),
            _ => failure,
        }
    }
}

/// A URI with tables under `fletch/`.
#[derive(Clone)]
pub struct TablesLocation {
    origin: Origin,
}

impl TablesLocation {
    /// Opens the location at `uri`.
    ///
    /// # Errors
    /// [`Failure`] when no origin is configured for it.
    pub fn open(origins: &Origins, uri: &OriginUri) -> Result<Self, Failure> {
        Ok(TablesLocation { origin: origins.open(uri)? })
    }

    /// Returns the origin of the location.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the URI of the location.
    #[must_use]
    pub fn uri(&self) -> String {
        self.origin.uri().to_string()
    }

    /// Reads a tag; `None` when it does not exist.
    ///
    /// # Errors
    /// [`Failure`] when the tag cannot be read.
    pub async fn tag(&self, tag: &TagName) -> Result<Option<TagDoc>, Failure> {
        match self.origin.get(&paths::tag(tag), None, None).await {
            Ok(got) => Ok(Some(TagDoc::parse(&got.bytes)?)),
            Err(OriginError::NotFound { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Reads all tags, in order of their names.
    ///
    /// # Errors
    /// [`Failure`] when they cannot be listed or read.
    pub async fn tags(&self) -> Result<Vec<(TagName, TagDoc)>, Failure> {
        let mut out = Vec::new();
        for name in self.listed(paths::TAGS).await? {
            let Ok(tag) = TagName::new(&name) else { continue };
            if let Some(doc) = self.tag(&tag).await? {
                out.push((tag, doc));
            }
        }
        Ok(out)
    }

    /// Creates or moves a tag.
    ///
    /// # Errors
    /// [`Failure`] when the tag cannot be written.
    pub async fn put_tag(&self, tag: &TagName, doc: &TagDoc) -> Result<(), Failure> {
        self.origin.put(&paths::tag(tag), doc.to_bytes()?.into(), PutMode::Overwrite).await?;
        Ok(())
    }

    /// Deletes a tag.
    ///
    /// # Errors
    /// [`Failure`] when the tag does not exist or cannot be deleted.
    pub async fn delete_tag(&self, tag: &TagName) -> Result<(), Failure> {
        if self.tag(tag).await?.is_none() {
            return Err(self.no_tag(tag).await);
        }
        Ok(self.origin.delete(&paths::tag(tag)).await?)
    }

    /// Returns whether the location has no tags. False where they cannot be listed.
    pub async fn has_no_tags(&self) -> bool {
        self.listed(paths::TAGS).await.is_ok_and(|tags| tags.is_empty())
    }

    /// Returns the failure of a tag that does not exist here.
    pub async fn no_tag(&self, tag: &TagName) -> Failure {
        if let Some((path, what)) = self.origin.local_dir().and_then(in_the_way) {
            return Failure::new(format!(
                "{}: there is no tag {tag}: {} is {what}",
                self.uri(),
                path.display()
            ))
            .hint("tables are in directories below `fletch/`; if they are elsewhere, give that URI");
        }
        let uri = self.uri();
        let what = format!("{uri}: there is no tag {tag}");
        match self.listed(paths::TAGS).await {
            Ok(tags) if !tags.is_empty() => {
                let some = tags.iter().take(TAGS_NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
                Failure::new(what).hint(format!("its tags are: {some}; `fletch tag {uri}` lists all"))
            }
            _ => Failure::new(what).hint(format!(
                "`fletch index {uri}` makes a version and moves `latest`; if the tables are elsewhere, give \
                 their URI"
            )),
        }
    }

    /// Lists the names directly below `prefix`, each once: of every object the first component after
    /// `prefix`.
    async fn listed(&self, prefix: &str) -> Result<Vec<String>, Failure> {
        if self.origin.uri().is_plain_http() {
            return Err(Failure::new(format!("{} is a plain HTTP server, which has no listing", self.uri()))
                .hint("name a version by a tag, such as @latest"));
        }
        let mut out = BTreeSet::new();
        let mut list = self.origin.list(prefix);
        loop {
            match list.try_next().await {
                Ok(Some(object)) => {
                    let rest = object.path.strip_prefix(prefix).unwrap_or(&object.path);
                    let first = rest.split('/').next().unwrap_or(rest);
                    if !first.is_empty() && out.len() < LISTED_MAX && !out.contains(first) {
                        out.insert(first.to_owned());
                    }
                }
                Ok(None) | Err(OriginError::NotFound { .. }) => return Ok(out.into_iter().collect()),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Resolves a tag or root to a version and one of its layouts.
    ///
    /// # Errors
    /// [`Failure`] when the tag or the version does not exist or cannot be read.
    pub async fn resolve(&self, select: &Select) -> Result<(Root, LayoutId), Failure> {
        match select {
            Select::Tag(tag) => {
                let Some(doc) = self.tag(tag).await? else { return Err(self.no_tag(tag).await) };
                Ok((doc.root, doc.layout))
            }
            Select::Root(root) => {
                // A packed layout wins over an index layout, and the last by name over the others.
                let layouts = self.layouts(*root).await?;
                let best = layouts.iter().max_by_key(|l| (l.params.kind == LayoutKind::Pack, l.layout));
                best.map(|l| (*root, l.layout)).ok_or_else(|| {
                    Failure::new(format!("{}: there is no version {root}", self.uri())).hint(format!(
                        "`fletch tag {}` lists the tagged versions; if tables are elsewhere, give that URI",
                        self.uri()
                    ))
                })
            }
        }
    }

    /// Reads the layouts of a root that have a `layout.json`, in order of their names.
    ///
    /// # Errors
    /// [`Failure`] when they cannot be listed or read.
    pub async fn layouts(&self, root: Root) -> Result<Vec<LayoutDoc>, Failure> {
        let mut found = Vec::new();
        for name in self.listed(&paths::layouts(root)).await? {
            let Ok(layout) = name.parse::<LayoutId>() else { continue };
            match self.origin.get(&paths::layout(root, layout), None, None).await {
                Ok(got) => found.push(LayoutDoc::parse_any(&got.bytes)?),
                Err(OriginError::NotFound { .. }) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(found)
    }

    /// Opens a version.
    ///
    /// # Errors
    /// [`Failure`] when its tables cannot be read or are damaged.
    pub async fn version(&self, root: Root, layout: LayoutId) -> Result<Version, Failure> {
        self.version_keeping(root, layout, PART_CACHE_BYTES).await
    }

    /// Opens a version with a part cache of at most `bytes` bytes.
    ///
    /// # Errors
    /// As [`TablesLocation::version`].
    pub async fn version_keeping(
        &self,
        root: Root,
        layout: LayoutId,
        bytes: u64,
    ) -> Result<Version, Failure> {
        let source = Arc::new(OriginTables::new(self.origin.clone(), root, layout));
        Ok(Version::open(source, root, layout, PartCache::new(bytes)).await?)
    }
}

/// Removes the directories above a deleted file of a local location, as far as they are empty.
pub fn remove_empty_dirs(origin: &Origin, path: &str) {
    let Some(top) = origin.local_dir() else { return };
    for dir in Path::new(path).ancestors().skip(1).take_while(|dir| dir.components().next().is_some()) {
        if std::fs::remove_dir(top.join(dir)).is_err() {
            return;
        }
    }
}

/// Returns what is in the way of the directories of tables below `to`, and what it is.
#[must_use]
pub fn in_the_way(to: &Path) -> Option<(PathBuf, &'static str)> {
    let top = to.join(paths::PREFIX.trim_end_matches('/'));
    let below = RESERVED.iter().map(|name| top.join(name));
    std::iter::once(top.clone()).chain(below).find_map(|path| {
        let itself = std::fs::symlink_metadata(&path).ok()?;
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => None,
            Err(_) if itself.is_symlink() => Some((path, "a link to nothing")),
            Ok(_) if itself.is_symlink() => Some((path, "a link to a file")),
            _ => Some((path, "a file")),
        }
    })
}

/// Returns the layout with these parameters. Prefers `preferred` if several have them.
#[must_use]
pub fn layout_of(layouts: &[LayoutDoc], params: &LayoutParams, preferred: LayoutId) -> Option<LayoutId> {
    let mut same = layouts.iter().filter(|l| l.params == *params);
    let named = same.clone().find(|l| l.layout == preferred);
    named.or_else(|| same.next()).map(|l| l.layout)
}
