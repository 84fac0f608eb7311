//! A place where tables are: its tags and its versions.

use crate::failure::{Exit, Failure};
use crate::target::Select;
use fletch_client::fallback::OriginTables;
use fletch_core::manifest::{LayoutKind, LayoutParams};
use fletch_core::{Kind, LayoutId, Root, TagName};
use fletch_origin::{Origin, OriginError, OriginUri, Origins, PutMode};
use fletch_tables::{LayoutDoc, PartCache, TableError, TagDoc, Version, paths};
use futures::TryStreamExt;
use std::sync::Arc;

/// Parts held in memory by one command, in bytes.
const PART_CACHE_BYTES: u64 = 32 << 20;
/// Tags and layouts looked at before giving up.
const LISTED_MAX: usize = 100_000;

impl From<OriginError> for Failure {
    fn from(e: OriginError) -> Self {
        let exit = match &e {
            OriginError::Denied { .. } => Exit::Denied,
            OriginError::Unavailable { .. } | OriginError::Throttled { .. } => Exit::Unreachable,
            _ => Exit::Failed,
        };
        Failure::new(e.to_string()).exit(exit)
    }
}

impl From<TableError> for Failure {
    fn from(e: TableError) -> Self {
        let failure = Failure::of(e.kind(), e.to_string());
        match e.kind() {
            Kind::Corrupt => {
                failure.hint("the tables are damaged; index the dataset again to write them anew")
            }
            _ => failure,
        }
    }
}

/// A place with tables under `fletch/`.
#[derive(Clone)]
pub struct Place {
    origin: Origin,
}

impl Place {
    /// Opens the place at `uri`.
    ///
    /// # Errors
    /// [`Failure`] when no origin is configured for it.
    pub fn open(origins: &Origins, uri: &OriginUri) -> Result<Self, Failure> {
        Ok(Place { origin: origins.open(uri)? })
    }

    /// The origin it is at.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Where it is.
    #[must_use]
    pub fn uri(&self) -> String {
        self.origin.uri().to_string()
    }

    /// What a tag names; `None` when there is no such tag.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be read.
    pub async fn tag(&self, tag: &TagName) -> Result<Option<TagDoc>, Failure> {
        match self.origin.get(&paths::tag(tag), None, None).await {
            Ok(got) => Ok(Some(TagDoc::parse(&got.bytes)?)),
            Err(OriginError::NotFound { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// All tags, by name.
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

    /// Moves a tag.
    ///
    /// # Errors
    /// [`Failure`] when it cannot be written.
    pub async fn put_tag(&self, tag: &TagName, doc: &TagDoc) -> Result<(), Failure> {
        self.origin.put(&paths::tag(tag), doc.to_bytes()?.into(), PutMode::Overwrite).await?;
        Ok(())
    }

    /// Removes a tag.
    ///
    /// # Errors
    /// [`Failure`] when there is none, or it stays.
    pub async fn delete_tag(&self, tag: &TagName) -> Result<(), Failure> {
        if self.tag(tag).await?.is_none() {
            return Err(self.no_tag(tag));
        }
        Ok(self.origin.delete(&paths::tag(tag)).await?)
    }

    fn no_tag(&self, tag: &TagName) -> Failure {
        Failure::new(format!("{}: there is no tag {tag}", self.uri()))
            .hint("`fletch tag URI` lists the tags; `fletch index URI` makes a version and moves `latest`; give the place that --to named")
    }

    /// The last path components directly or further below `prefix`, made of what comes first
    /// after it, without repetition.
    async fn listed(&self, prefix: &str) -> Result<Vec<String>, Failure> {
        let mut out: Vec<String> = Vec::new();
        let mut list = self.origin.list(prefix);
        loop {
            match list.try_next().await {
                Ok(Some(object)) => {
                    let rest = object.path.strip_prefix(prefix).unwrap_or(&object.path);
                    let first = rest.split('/').next().unwrap_or(rest);
                    if out.last().is_none_or(|last| last != first) && out.len() < LISTED_MAX {
                        out.push(first.to_owned());
                    }
                }
                Ok(None) | Err(OriginError::NotFound { .. }) => return Ok(out),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The version and layout that `select` means here.
    ///
    /// # Errors
    /// [`Failure`] when there is none, or it cannot be read.
    pub async fn resolve(&self, select: &Select) -> Result<(Root, LayoutId), Failure> {
        match select {
            Select::Tag(tag) => {
                let doc = self.tag(tag).await?.ok_or_else(|| self.no_tag(tag))?;
                Ok((doc.root, doc.layout))
            }
            Select::Root(root) => {
                // Of several layouts a packed one if there is one, and of those the last by name.
                let layouts = self.layouts(*root).await?;
                let best = layouts.iter().max_by_key(|l| (l.params.kind == LayoutKind::Pack, l.layout));
                best.map(|l| (*root, l.layout)).ok_or_else(|| {
                    Failure::new(format!("{}: there is no version {root}", self.uri()))
                        .hint("give the place that --to named; `fletch tag URI` lists what is tagged")
                })
            }
        }
    }

    /// The layouts of a root that are whole, in order of their names.
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

    /// The index layout of a root that every index makes; `layout` itself if it is one.
    ///
    /// # Errors
    /// [`Failure`] when the layouts cannot be listed or read.
    pub async fn index_layout(&self, root: Root, layout: LayoutId) -> Result<Option<LayoutId>, Failure> {
        let layouts = self.layouts(root).await?;
        let of = |l: &&LayoutDoc| l.params == LayoutParams::INDEX;
        let named = layouts.iter().filter(of).find(|l| l.layout == layout);
        Ok(named.or_else(|| layouts.iter().find(of)).map(|l| l.layout))
    }

    /// Opens a version.
    ///
    /// # Errors
    /// [`Failure`] when its tables cannot be read or believed.
    pub async fn version(&self, root: Root, layout: LayoutId) -> Result<Version, Failure> {
        self.version_keeping(root, layout, PART_CACHE_BYTES).await
    }

    /// Opens a version that keeps at most `bytes` of parts nobody holds.
    ///
    /// # Errors
    /// As [`Place::version`].
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
