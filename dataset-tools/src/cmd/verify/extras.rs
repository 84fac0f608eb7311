//! What lies at the origin and is not in the version.

use super::{Found, Sink};
use crate::cmd::Ctx;
use crate::failure::Failure;
use crate::index::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use fletch_core::manifest::EntryKind;
use fletch_origin::{Origin, OriginUri};
use fletch_tables::{Version, paths};
use futures::StreamExt;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// What lies at the origin and is not in the version.
pub fn extras(
    ctx: &Ctx,
    version: &Version,
    origin: &Origin,
    tables: Option<&OriginUri>,
    sink: &mut Sink<'_>,
) -> Result<(), Failure> {
    let skipped: BTreeSet<&str> = version.manifest().skipped.iter().map(|f| f.path.as_str()).collect();
    let mut seen = Seen { ctx, version, any_link: None };
    let extra = |path: String, what: &str| Found {
        path,
        fault: "extra",
        why: format!("{what} that is not in the version"),
    };
    if origin.uri().is_plain_http() {
        ctx.out.note("a plain HTTP server has no listing: what is not in the version is not looked for");
        return Ok(());
    }
    let Some(dir) = origin.local_dir() else {
        let mut list = origin.list("");
        while let Some(object) = ctx.rt.block_on(list.next()) {
            let path = object?.path;
            let own =
                path.starts_with(paths::PREFIX) || tables.is_some_and(|t| below(origin.uri(), t, &path));
            if !own && !skipped.contains(path.as_str()) && !seen.has(&path)? {
                sink.push(&extra(path, "an object"))?;
            }
        }
        return Ok(());
    };
    let mut exclude = BTreeSet::from(["fletch".to_owned()]);
    let base = std::fs::canonicalize(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    if let Some(place) = tables.and_then(OriginUri::as_local).and_then(|p| std::fs::canonicalize(p).ok())
        && let Some(rel) = place.strip_prefix(&base).ok().and_then(Path::to_str).filter(|r| !r.is_empty())
    {
        exclude.insert(rel.to_owned());
    }
    let options = WalkOptions { base, symlinks: Symlinks::Keep, exclude, names_bytes_max: NAMES_BYTES_MAX };
    let cannot = |e: io::Error| Failure::io(format_args!("cannot list {}", dir.display()), &e);
    let mut walk = Walk::new(options, &std::env::temp_dir()).map_err(cannot)?;
    let mut last = String::new();
    while let Some(step) = walk.next_step().map_err(cannot)? {
        let (path, what) = match step {
            Step::File { path, .. } => (path, "a file"),
            Step::Link { path } => {
                // Left out or followed when the version was made, if it has no links at all.
                if !seen.any_link()? || seen.below(&path)? {
                    last = path;
                    continue;
                }
                (path, "a link")
            }
            Step::DirEnd { path } => {
                if last.strip_prefix(path.as_str()).is_some_and(|r| r.starts_with('/')) {
                    continue;
                }
                (path + "/", "an empty directory")
            }
            Step::Fault { path, .. } => {
                if !skipped.contains(path.as_str()) {
                    sink.push(&extra(path, "something"))?;
                }
                continue;
            }
        };
        if !skipped.contains(path.as_str()) && !seen.has(&path)? {
            sink.push(&extra(path.clone(), what))?;
        }
        last = path;
    }
    Ok(())
}

/// Whether `path`, relative to `base`, lies in `place`.
fn below(base: &OriginUri, place: &OriginUri, path: &str) -> bool {
    base != place && base.join(path).is_ok_and(|p| place.contains(&p))
}

struct Seen<'a> {
    ctx: &'a Ctx,
    version: &'a Version,
    any_link: Option<bool>,
}

impl Seen<'_> {
    /// Whether the version has this entry. What its damaged tables cannot tell was reported.
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

    /// Whether links were kept when the version was made: it has one.
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
            if (0..part.entries.len()).any(|row| part.entries.get(row).kind == EntryKind::Symlink) {
                any = true;
                break;
            }
        }
        self.any_link = Some(any);
        Ok(any)
    }
}
