//! Cuts a listing into pages, as the manners of the store say.

use super::manners::{Delimiters, KeyOrder, Manners, Paging};
use super::objects::{ListedObject, Objects};
use std::collections::HashSet;

/// The most keys of a page at AWS.
const PAGE_KEYS_MAX: usize = 1000;

/// What a client asks of a listing.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub prefix: String,
    /// Whether keys with a further `/` are returned as their common prefixes.
    pub is_delimited: bool,
    pub max_keys: usize,
    /// Whether the client asks with `list-type=2`.
    pub version_2: bool,
    pub token: Option<String>,
    pub start_after: Option<String>,
    pub marker: Option<String>,
    /// Whether the client asks with `encoding-type=url`.
    pub encoded: bool,
}

/// A page of a listing.
pub(super) struct Page {
    pub objects: Vec<ListedObject>,
    /// Common prefixes, and keys that end in `/` where the store lists them as prefixes.
    pub prefixes: Vec<String>,
    pub truncated: bool,
    /// The token; an empty text is an element without text.
    pub token: Option<String>,
    pub next_marker: Option<String>,
}

/// A token of manners with pages without keys: the number of such pages so far, and the last key.
struct Counted {
    empty: u32,
    after: String,
}

impl Counted {
    fn parse(token: &str) -> Self {
        let (empty, after) = token.split_once('!').unwrap_or(("0", token));
        Counted { empty: empty.parse().unwrap_or(0), after: after.to_owned() }
    }

    fn text(&self) -> String {
        format!("{}!{}", self.empty, self.after)
    }
}

/// Returns the page that a client asks for.
pub(super) fn page(objects: &Objects, manners: &Manners, asked: &Asked) -> Page {
    let max = asked.max_keys.min(manners.page_keys.unwrap_or(PAGE_KEYS_MAX)).min(PAGE_KEYS_MAX);
    let version_2 = asked.version_2 && !matches!(manners.paging, Paging::Markers { .. });
    let after =
        if version_2 { asked.token.as_ref().or(asked.start_after.as_ref()) } else { asked.marker.as_ref() };
    let after = after.map(String::as_str);
    let mut page = match asked.is_delimited && manners.delimiters != Delimiters::Ignored {
        true => children(objects, manners, &asked.prefix, after, max),
        false => cut(objects, manners, &asked.prefix, after, max),
    };
    if !version_2 {
        let marked = matches!(manners.paging, Paging::Markers { next_marker: true });
        page.next_marker = page.token.take().filter(|_| marked && page.truncated);
    }
    if manners.folders_as_prefixes {
        let folders = page.objects.extract_if(.., |listed| listed.key.ends_with('/'));
        page.prefixes = folders.map(|listed| listed.key).collect();
    }
    page
}

/// Returns what lies directly below a prefix.
fn children(objects: &Objects, manners: &Manners, prefix: &str, after: Option<&str>, max: usize) -> Page {
    let folder_of = |key: &str| key[prefix.len()..].find('/').map(|at| key[..=prefix.len() + at].to_owned());
    let mut page =
        Page { objects: Vec::new(), prefixes: Vec::new(), truncated: false, token: None, next_marker: None };
    let mut last = after.map(str::to_owned);
    // Without the order of bytes, the keys of a folder may lie apart.
    let mut others = match manners.order {
        KeyOrder::Bytes => None,
        order => {
            let mut known = HashSet::new();
            let (mut all, _) = select(objects, order, prefix, None, usize::MAX);
            all.retain(|o| known.insert(folder_of(&o.key).unwrap_or(o.key.clone())));
            let name = |o: &ListedObject| folder_of(&o.key).unwrap_or(o.key.clone());
            let begin = after.and_then(|after| all.iter().position(|o| name(o) == after));
            Some(all.into_iter().skip(begin.map_or(0, |at| at + 1)))
        }
    };
    loop {
        let next = match &mut others {
            Some(others) => others.next(),
            None => {
                // After a common prefix come the keys that do not have it.
                let from = last.as_ref().map(|last| match last.ends_with('/') && last.len() > prefix.len() {
                    true => format!("{last}\u{10ffff}\u{10ffff}"),
                    false => last.clone(),
                });
                select(objects, manners.order, prefix, from.as_deref(), 1).0.into_iter().next()
            }
        };
        let Some(object) = next else { break };
        if page.objects.len() + page.prefixes.len() == max {
            page.truncated = true;
            page.token = last.filter(|_| manners.paging != Paging::NoToken);
            break;
        }
        let folder = folder_of(&object.key);
        last = Some(folder.clone().unwrap_or(object.key.clone()));
        match folder {
            Some(folder) => page.prefixes.push(folder),
            None => page.objects.push(object),
        }
    }
    page
}

fn cut(objects: &Objects, manners: &Manners, prefix: &str, after: Option<&str>, max: usize) -> Page {
    let real = |after: Option<&str>| {
        let (found, more) = select(objects, manners.order, prefix, after, max);
        // The token is the last key, so an object that is written between two pages is listed at most once.
        let token = found.last().filter(|_| more).map(|last| last.key.clone());
        Page { objects: found, prefixes: Vec::new(), truncated: more, token, next_marker: None }
    };
    let empty = |truncated, token: Counted| Page {
        objects: Vec::new(),
        prefixes: Vec::new(),
        truncated,
        token: Some(token.text()),
        next_marker: None,
    };
    match manners.paging {
        Paging::Tokens | Paging::Markers { .. } => real(after),
        Paging::NoToken => Page { token: None, ..real(after) },
        Paging::SamePage => {
            let first = real(None);
            Page { token: first.token.clone().or(Some("next".to_owned())), truncated: true, ..first }
        }
        Paging::EmptyTokenElement => {
            let page = real(after);
            Page { token: page.token.clone().or(Some(String::new())), ..page }
        }
        Paging::RepeatLastKey => {
            let mut page = real(after);
            if let Some(again) = after.and_then(|key| objects.listed(key.to_owned())) {
                page.objects.insert(0, again);
            }
            page
        }
        Paging::TokenAtEnd => {
            let at = after.map(Counted::parse);
            let page = real(at.as_ref().map(|at| at.after.as_str()));
            let Some(last) = page.objects.last() else {
                let Counted { empty: n, after } = at.unwrap_or(Counted { empty: 0, after: String::new() });
                return empty(false, Counted { empty: n + 1, after });
            };
            let token = Counted { empty: 0, after: last.key.clone() };
            Page { token: Some(token.text()), ..page }
        }
        Paging::EmptyPages(between) => match after.map(Counted::parse) {
            Some(at) if at.empty < between => empty(true, Counted { empty: at.empty + 1, ..at }),
            at => {
                let page = real(at.as_ref().map(|at| at.after.as_str()));
                let token = page.token.clone().map(|after| Counted { empty: 0, after }.text());
                Page { token, ..page }
            }
        },
        Paging::EndlessEmptyPages => match after.map(Counted::parse) {
            Some(at) => empty(true, Counted { empty: at.empty + 1, ..at }),
            None => {
                let page = real(None);
                let after = page.objects.last().map(|last| last.key.clone()).unwrap_or_default();
                Page { token: Some(Counted { empty: 0, after }.text()), truncated: true, ..page }
            }
        },
    }
}

/// Returns the first `max` objects after a key, in the order of the store, and whether there are more.
fn select(
    objects: &Objects,
    order: KeyOrder,
    prefix: &str,
    after: Option<&str>,
    max: usize,
) -> (Vec<ListedObject>, bool) {
    if order == KeyOrder::Bytes {
        return objects.list(prefix, after, max);
    }
    if order == KeyOrder::Shuffled
        && prefix.is_empty()
        && let Some(page) = objects.list_generated(after, max)
    {
        return page;
    }
    let (mut all, _) = objects.list(prefix, None, usize::MAX);
    all.sort_by_cached_key(|listed| order.rank(&listed.key));
    let after = after.map(|key| order.rank(key));
    if let Some(after) = after {
        all.retain(|listed| order.rank(&listed.key) > after);
    }
    let more = all.len() > max;
    all.truncate(max);
    (all, more)
}
