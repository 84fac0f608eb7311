//! `ListObjects` and `ListObjectsV2`: keys and common prefixes of the datasets of the caller's domain.
//!
//! ```text
//! the bucket   DATASET/path of every registered dataset, in byte order of the keys
//!    ├ a prefix without slash, a delimiter within `DATASET/`: answered from the names alone
//!    └ else: a range read of the tables of each dataset that has keys of the page (`Version::keys`)
//! ```
//! `DATASET@TAG/…` and `DATASET@ROOT/…` are listed only below a prefix that names them.

use super::{
    dataset::DatasetVersion,
    error::{S3Code, S3Error, S3Result},
    object::{content_of, modified},
    token::Continuation,
};
use crate::{
    app::server::Server, data::versions::AskTables, http::admission::acquire_read_permit,
    tenancy::auth::Principal,
};
use fletch_core::Root;
use fletch_tables::{KeyItem, KeyRange, successor};
use futures::FutureExt as _;
use std::{sync::Arc, time::SystemTime};

/// What a request lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    pub prefix: String,
    pub delimiter: Option<String>,
    /// The most keys and common prefixes of the page.
    pub max: usize,
    pub begin: Continuation,
}

/// An object as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedObject {
    pub key: String,
    pub size: u64,
    /// The BLAKE3 hash of its bytes, in hexadecimal digits.
    pub hash: String,
    pub modified: SystemTime,
}

/// An item of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    Object(ListedObject),
    Prefix(String),
}

/// A page of a listing.
#[derive(Debug, Default)]
pub struct Page {
    pub items: Vec<Item>,
    /// Where the next page begins. `None`: this is the last page.
    pub next: Option<Continuation>,
}

impl Item {
    /// Returns the key or the common prefix.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Item::Object(object) => &object.key,
            Item::Prefix(prefix) => prefix,
        }
    }

    /// Returns the first key that may follow; `None` if none can.
    fn next(&self) -> Option<Vec<u8>> {
        match self {
            Item::Object(object) => Some([object.key.as_bytes(), b"\0"].concat()),
            Item::Prefix(prefix) => successor(prefix.as_bytes()),
        }
    }
}

/// A dataset whose keys may be on the page. Its keys begin with `base`, which ends with a slash.
struct Candidate {
    base: String,
    version: DatasetVersion,
    /// Whether the request names its version, and not only a prefix of its name.
    is_pinned: bool,
}

/// The items found so far, each with the root of its version.
type Found = Vec<(Item, Option<Root>)>;

/// Returns a page.
///
/// # Errors
/// [`S3Code::InvalidArgument`] for a continuation of a version that is gone; [`S3Code::NotImplemented`] for a
/// delimiter with a slash inside where names of datasets are listed; those of the origin and of limits.
pub async fn page(server: &Arc<Server>, principal: &Principal, listing: &Listing) -> S3Result<Page> {
    let _permit = acquire_read_permit(server, &principal.tenant)?;
    if listing.max == 0 {
        return Ok(Page::default());
    }
    let mut found = Found::new();
    for candidate in candidates(server, principal, &listing.prefix) {
        // One more than the page has says whether another page follows.
        let missing = (listing.max + 1).saturating_sub(found.len());
        if missing == 0 {
            break;
        }
        let base = candidate.base.as_bytes();
        if successor(base).is_some_and(|end| end <= listing.begin.from) {
            continue;
        }
        match rolled_up(&candidate, listing)? {
            None => found.extend(keys(server, principal, &candidate, listing, missing).await?),
            Some(prefix) => {
                let is_new = found.last().is_none_or(|(last, _)| last.text() != prefix);
                let is_ahead = successor(prefix.as_bytes()).is_none_or(|end| end > listing.begin.from);
                let exists =
                    !candidate.is_pinned || candidate.version.open(server, principal, None).await?.is_some();
                if is_new && is_ahead && exists {
                    found.push((Item::Prefix(prefix), None));
                }
            }
        }
    }
    let is_truncated = found.len() > listing.max;
    found.truncate(listing.max);
    let last = found.last().filter(|_| is_truncated);
    let next = last.and_then(|(item, root)| Some(Continuation { root: *root, from: item.next()? }));
    Ok(Page { items: found.into_iter().map(|(item, _)| item).collect(), next })
}

/// Returns the datasets whose keys may begin with the prefix, in the order of their keys.
fn candidates(server: &Server, principal: &Principal, prefix: &str) -> Vec<Candidate> {
    let named = prefix.split('/').next().unwrap_or(prefix);
    if named.len() < prefix.len() || named.contains('@') {
        let version = DatasetVersion::read(named);
        let is_pinned = named.contains('@');
        let one = version.map(|version| Candidate { base: format!("{named}/"), version, is_pinned });
        return one.into_iter().collect();
    }
    let all = server.registrations.list(&principal.domain);
    let names = all.iter().map(|entry| entry.dataset.name.as_str());
    let mut out: Vec<_> = names
        .filter(|name| name.starts_with(prefix))
        .filter_map(|name| {
            let version = DatasetVersion::read(name)?;
            Some(Candidate { base: format!("{name}/"), version, is_pinned: false })
        })
        .collect();
    // With the slash: `a-b/` comes before `a/`.
    out.sort_by(|a, b| a.base.cmp(&b.base));
    out
}

/// Returns the common prefix of all keys of a dataset, if the delimiter lies in the part that they share.
fn rolled_up(candidate: &Candidate, listing: &Listing) -> S3Result<Option<String>> {
    let Candidate { base, .. } = candidate;
    let (begin, Some(delimiter)) = (listing.prefix.len(), &listing.delimiter) else { return Ok(None) };
    let Some(rest) = base.get(begin..).filter(|rest| !rest.is_empty()) else { return Ok(None) };
    if let Some(at) = rest.find(delimiter.as_str()) {
        return Ok(Some(base[..begin + at + delimiter.len()].to_owned()));
    }
    match delimiter.strip_suffix('/').unwrap_or(delimiter).contains('/') {
        true => {
            let why = "with a delimiter that has a slash inside, the prefix must name a dataset and a slash";
            Err(S3Error::new(S3Code::NotImplemented, why))
        }
        false => Ok(None),
    }
}

/// Returns at most `max` keys and common prefixes of one dataset, each with the root of its version.
async fn keys(
    server: &Arc<Server>,
    principal: &Principal,
    candidate: &Candidate,
    listing: &Listing,
    max: usize,
) -> S3Result<Found> {
    let Candidate { base, version, .. } = candidate;
    let from = listing.begin.from.strip_prefix(base.as_bytes());
    let pinned = listing.begin.root.filter(|_| from.is_some());
    let Some(sources) = version.open(server, principal, pinned).await? else {
        return match pinned {
            None => Ok(Found::new()),
            Some(_) => {
                let why = "the version of the continuation token is gone: begin the listing again";
                Err(S3Error::new(S3Code::InvalidArgument, why))
            }
        };
    };
    let prefix: Arc<str> = listing.prefix.get(base.len()..).unwrap_or("").into();
    let (from, delimiter) = (from.unwrap_or(b"").to_vec(), listing.delimiter.clone());
    let ask: AskTables<_> = Box::new(move |source| {
        let (prefix, delimiter, from) = (Arc::clone(&prefix), delimiter.clone(), from.clone());
        async move {
            let range = KeyRange { prefix: &prefix, delimiter: delimiter.as_deref(), from: &from };
            Ok(source.version.keys(range, max).await?)
        }
        .boxed()
    });
    let (source, items) = server.versions.ask_tables(&sources, None, ask).await?;
    let (root, modified) = (sources.root(), modified(&source));
    let item = |item: KeyItem| {
        Ok::<_, S3Error>(match item {
            KeyItem::Prefix(prefix) => Item::Prefix(format!("{base}{prefix}")),
            KeyItem::Key(key) => {
                let (hash, size) = content_of(&key)?;
                let key = format!("{base}{}", key.path);
                Item::Object(ListedObject { key, size, hash: hash.to_string(), modified })
            }
        })
    };
    items.into_iter().map(|one| Ok((item(one)?, Some(root)))).collect()
}

impl Listing {
    /// Sets where the listing begins: after this key, and after all keys of the common prefix that has it.
    pub fn begin_after(&mut self, key: &str) {
        let begin = self.prefix.len();
        let rolled = self.delimiter.as_ref().and_then(|delimiter| {
            let at = key.strip_prefix(self.prefix.as_str())?.find(delimiter.as_str())?;
            successor(&key.as_bytes()[..begin + at + delimiter.len()])
        });
        let from = rolled.unwrap_or_else(|| [key.as_bytes(), b"\0"].concat());
        self.begin = Continuation { root: None, from };
    }
}
