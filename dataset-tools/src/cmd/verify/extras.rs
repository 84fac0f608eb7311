//! Finds objects at the dataset that the version does not have.

use super::{FaultSink, VerifyFault};
use crate::cmd::Context;
use crate::failure::Failure;
use crate::source::listing::{KeyOrder, KeySorting, Listed, ListingError, Objects};
use crate::source::outage::directory_outage;
use crate::source::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use fletch_core::manifest::EntryKind;
use fletch_origin::{Origin, OriginUri};
use fletch_tables::Version;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Reports every object at the dataset that the version does not have.
pub fn extras(
    ctx: &Context,
    version: &Version,
    origin: &Origin,
    tables: Option<&OriginUri>,
    one_file_system: bool,
    sink: &mut FaultSink<'_>,
) -> Result<(), Failure> {
    let skipped: BTreeSet<&str> = version.manifest().skipped.iter().map(|f| f.path.as_str()).collect();
    let mut entries = VersionEntries { ctx, version, any_link: None };
    let extra = |path: String, what: &str| VerifyFault {
        path,
        fault: "extra",
        why: format!("the version does not have this {what}"),
    };
    if origin.uri().is_plain_http() {
        ctx.out.note("a plain HTTP server has no listing, so objects outside the version cannot be found");
        return Ok(());
    }
    let Some(dir) = origin.local_dir() else {
        let scratch = std::env::temp_dir();
        let exclude = tables.and_then(|tables| tables.below(origin.uri())).filter(|dir| !dir.is_empty());
        // Sorted from the start: a listing that shows its disorder late would begin anew.
        let sorting = KeySorting { order: KeyOrder::Sorted, scratch: &scratch, out: None };
        let mut objects = Objects::new(origin, None, exclude.into_iter().collect(), sorting);
        while let Some(item) = ctx.rt.block_on(objects.next()).map_err(ListingError::failure)? {
            let (path, what) = match item {
                Listed::Object(object) => (object.path, "object"),
                Listed::EmptyDir { path } => (path + "/", "empty directory"),
                Listed::Link { path, .. } => (path, "link"),
                Listed::Fault { path, .. } => (path, "name, which cannot be an entry"),
                Listed::Failed { error, .. } => return Err(error.into()),
            };
            if !skipped.contains(path.as_str()) && !entries.has(&path)? {
                sink.push(&extra(path, what))?;
            }
        }
        return Ok(());
    };
    let mut exclude = BTreeSet::from(["fletch".to_owned()]);
    let base = std::fs::canonicalize(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    if let Some(dir) = tables.and_then(OriginUri::as_local).and_then(|p| std::fs::canonicalize(p).ok())
        && let Some(rel) = dir.strip_prefix(&base).ok().and_then(Path::to_str).filter(|r| !r.is_empty())
    {
        exclude.insert(rel.to_owned());
    }
    let options = WalkOptions {
        base,
        symlinks: Symlinks::Keep,
        exclude,
        one_file_system,
        names_bytes_max: NAMES_BYTES_MAX,
    };
    let cannot = |e: io::Error| Failure::io(format_args!("cannot list {}", dir.display()), &e);
    let mut walk = Walk::new(options, &std::env::temp_dir()).map_err(cannot)?;
    let mut last = String::new();
    while let Some(step) = walk.next_step().map_err(cannot)? {
        let (path, what) = match step {
            Step::File { path, .. } => (path, "file"),
            Step::Link { path } => {
                // A version without any link was made with --symlinks skip or follow.
                if !entries.any_link()? || entries.below(&path)? {
                    last = path;
                    continue;
                }
                (path, "link")
            }
            Step::DirEnd { path } | Step::OtherFileSystem { path } => {
                if last.strip_prefix(path.as_str()).is_some_and(|r| r.starts_with('/')) {
                    continue;
                }
                (path + "/", "empty directory")
            }
            Step::Outage { path, errno } => {
                return Err(directory_outage(&dir.join(path), &io::Error::from_raw_os_error(errno)));
            }
            Step::Fault { path, .. } | Step::Unreadable { path, .. } => {
                if !skipped.contains(path.as_str()) {
                    sink.push(&extra(path, "name, which cannot be an entry"))?;
                }
                continue;
            }
        };
        if !skipped.contains(path.as_str()) && !entries.has(&path)? {
            sink.push(&extra(path.clone(), what))?;
        }
        last = path;
    }
    Ok(())
}

/// Looks up entries of the version.
struct VersionEntries<'a> {
    ctx: &'a Context,
    version: &'a Version,
    any_link: Option<bool>,
}

impl VersionEntries<'_> {
    /// Whether the version has this entry. True for an entry in damaged tables, which were reported before.
    fn has(&self, path: &str) -> Result<bool, Failure> {
        match self.ctx.rt.block_on(self.version.find(path)) {
            Ok(found) => Ok(found.is_some()),
            Err(e) if e.kind() == fletch_core::Kind::Corrupt => Ok(true),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether the version has entries below this path.
    fn below(&self, path: &str) -> Result<bool, Failure> {
        let dir = format!("{path}/");
        let found = self.ctx.rt.block_on(async {
            let at = self.version.lower_bound(dir.as_bytes()).await?;
            self.version.entry(at).await
        })?;
        Ok(found.is_some_and(|f| f.entry().path.starts_with(&dir)))
    }

    /// Whether the version has any link, so that it was made with --symlinks keep.
    fn any_link(&mut self) -> Result<bool, Failure> {
        if let Some(any) = self.any_link {
            return Ok(any);
        }
        let mut any = false;
        for i in 0..self.version.index().parts().len() {
            let part = match self.ctx.rt.block_on(self.version.part(i)) {
                Ok(part) => part,
                Err(e) if e.kind() == fletch_core::Kind::Corrupt => continue,
                Err(e) => return Err(e.into()),
            };
            if (0..part.len()).any(|row| part.entry(row).kind == EntryKind::Symlink) {
                any = true;
                break;
            }
        }
        self.any_link = Some(any);
        Ok(any)
    }
}
