//! Remembers the entity tags under which objects have the bytes that were indexed.
//!
//! A copy of a bucket, or an upload of equal bytes, gives objects other tags than those in the tables. The
//! first read of such an object costs a second request; the hash then decides. This room remembers the new
//! tag, so that the next read sends it at once.
//!
//! Invariants:
//! 1. Only bytes that match the hash of the tables give a tag ([`RenewedPins::note`]).
//! 2. A tag is for the pin of the tables that it renews. Another version of the dataset starts anew.
//! 3. Soft: forgetting an object costs its next read one request. Bounded by [`BYTES_MAX`].
//! 4. An object with two tags (two web servers of one name) is read without a condition: the hash decides.

use fletch_api::{ObjectPin, RenewedPin};
use fletch_core::Domain;
use fletch_origin::{ObjectMeta, OriginUri, Pin};
use moka::{ops::compute::Op, sync::Cache};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// The most bytes of memory for renewed pins: about 200,000 objects.
const BYTES_MAX: u64 = 64 << 20;
/// The most tags of one object that are remembered.
const TAGS_MAX: usize = 2;
/// The most gaps between verified ranges of one object. An object that is read in more pieces at once is
/// served all the same, but `refresh` reads it again.
const RANGES_MAX: usize = 256;

/// The name of an object: domains share no memory (I7).
pub(super) fn object_key(domain: &Domain, uri: &OriginUri, path: &str) -> String {
    format!("{}{path}", key_prefix(domain, &uri.to_string()))
}

fn key_prefix(domain: &Domain, uri: &str) -> String {
    format!("{domain}\0{uri}\0")
}

/// A tag under which bytes of an object were right.
#[derive(Debug, Clone)]
struct SeenTag {
    pin: Pin,
    /// The ranges of the object that had the right hash under this tag: disjoint, ascending.
    verified: Vec<Range<u64>>,
}

impl SeenTag {
    fn is(&self, now: &Pin) -> bool {
        self.pin.proves_same(now)
    }

    /// Whether every byte of the object was right under this tag.
    fn is_complete(&self) -> bool {
        let size = self.pin.size;
        matches!(&self.verified[..], [all] if all.start == 0 && all.end == size)
    }

    /// Adds a range, and joins ranges that touch.
    fn add(&mut self, range: Range<u64>) {
        let from = self.verified.partition_point(|r| r.end < range.start);
        let to = self.verified.partition_point(|r| r.start <= range.end);
        let touched = &self.verified[from..to];
        let start = touched.first().map_or(range.start, |r| r.start.min(range.start));
        let end = touched.last().map_or(range.end, |r| r.end.max(range.end));
        if from < to || self.verified.len() < RANGES_MAX {
            self.verified.splice(from..to, std::iter::once(start..end));
        }
    }
}

/// An object whose tag is another one than in the tables.
#[derive(Debug, Clone)]
struct RenewedObject {
    /// The pin of the tables.
    indexed: Pin,
    /// The tags that were seen: the latest one last.
    tags: Vec<SeenTag>,
}

impl RenewedObject {
    fn bytes(&self) -> usize {
        let pin = |pin: &Pin| size_of::<Pin>() + pin.etag.as_ref().map_or(0, String::len);
        let tag = |tag: &SeenTag| pin(&tag.pin) + tag.verified.len() * size_of::<Range<u64>>() + 64;
        pin(&self.indexed) + self.tags.iter().map(tag).sum::<usize>() + 64
    }
}

/// The renewed pins of all objects.
#[derive(Debug)]
pub struct RenewedPins(Cache<String, Arc<RenewedObject>>);

impl Default for RenewedPins {
    fn default() -> Self {
        let weigh = |key: &String, object: &Arc<RenewedObject>| {
            u32::try_from(key.len() + object.bytes()).unwrap_or(u32::MAX)
        };
        RenewedPins(Cache::builder().max_capacity(BYTES_MAX).weigher(weigh).build())
    }
}

impl RenewedPins {
    fn find(&self, key: &str, indexed: &Pin) -> Option<Arc<RenewedObject>> {
        self.0.get(key).filter(|object| object.indexed == *indexed)
    }

    /// Returns the pin to request an object with, in place of the pin of the tables.
    pub(super) fn pin_to_send(&self, key: &str, indexed: &Pin) -> Pin {
        match self.find(key, indexed).as_deref().map(|object| &object.tags[..]) {
            None | Some([]) => indexed.clone(),
            // A server that sends its tag without quotes does not match the form that HTTP requires.
            Some([one]) if one.pin.etag.as_ref().is_some_and(|tag| tag.contains('"')) => one.pin.clone(),
            Some(_) => Pin { size: indexed.size, mtime_ns: None, etag: None },
        }
    }

    /// Returns whether an answer says something new if its bytes are right, so that it is worth hashing them
    /// here.
    pub(super) fn is_news(&self, key: &str, indexed: &Pin, now: &ObjectMeta) -> bool {
        let now = now.pin();
        match self.find(key, indexed) {
            Some(object) => object.tags.iter().find(|tag| tag.is(&now)).is_none_or(|tag| !tag.is_complete()),
            // Also a tag that is the same, but in a form that `If-Match` does not match.
            None => indexed.difference(&now).is_some() || indexed.condition() != now.condition(),
        }
    }

    /// Returns whether right bytes of the object came with this tag before, which is not that of the tables.
    pub(super) fn knows(&self, key: &str, indexed: &Pin, now: &ObjectMeta) -> bool {
        let now = now.pin();
        self.find(key, indexed).is_some_and(|object| object.tags.iter().any(|tag| tag.is(&now)))
    }

    /// Records that a range of an object had the right hash in an answer with the tag of `now`.
    pub(super) fn note(&self, key: &str, indexed: &Pin, now: &ObjectMeta, range: Range<u64>) {
        let now = now.pin();
        self.0.entry_by_ref(key).and_compute_with(|entry| {
            let old = entry.map(|entry| entry.into_value()).filter(|object| object.indexed == *indexed);
            let mut object = match old {
                Some(old) => RenewedObject::clone(&old),
                None => RenewedObject { indexed: indexed.clone(), tags: Vec::new() },
            };
            match object.tags.iter_mut().find(|tag| tag.is(&now)) {
                Some(tag) => tag.add(range.clone()),
                None => {
                    if object.tags.len() == TAGS_MAX {
                        object.tags.remove(0);
                    }
                    object.tags.push(SeenTag { pin: now.clone(), verified: vec![range.clone()] });
                }
            }
            Op::Put(Arc::new(object))
        });
    }

    /// Returns the objects below a URI of which every byte was right under another tag than that of the
    /// tables: at most `max` of them, in path order, after the path `after`; and whether there are more.
    #[must_use]
    pub fn complete(
        &self,
        domain: &Domain,
        uri: &str,
        after: Option<&str>,
        max: usize,
    ) -> (Vec<RenewedPin>, bool) {
        let prefix = key_prefix(domain, uri);
        let mut found: BTreeMap<String, (Pin, Pin)> = BTreeMap::new();
        let mut more = false;
        for (key, object) in &self.0 {
            let Some(path) = key.strip_prefix(&prefix) else { continue };
            if after.is_some_and(|after| path <= after) {
                continue;
            }
            let new = |tag: &&SeenTag| tag.is_complete() && !tag.is(&object.indexed);
            let Some(tag) = object.tags.iter().rev().find(new) else { continue };
            found.insert(path.to_owned(), (object.indexed.clone(), tag.pin.clone()));
            if found.len() > max {
                found.pop_last();
                more = true;
            }
        }
        let view = |pin: Pin| ObjectPin { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
        let row = |(path, (old, new))| RenewedPin { path, old: view(old), new: view(new) };
        (found.into_iter().map(row).collect(), more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "default\0s3://b\0x";

    fn pin(etag: &str) -> Pin {
        Pin { size: 100, mtime_ns: Some(7), etag: Some(format!("\"{etag}\"")) }
    }

    fn answer(etag: &str) -> ObjectMeta {
        let Pin { size, mtime_ns, etag } = pin(etag);
        ObjectMeta { path: "x".into(), size, mtime_ns, etag }
    }

    fn listed(pins: &RenewedPins) -> Vec<RenewedPin> {
        pins.complete(&Domain::default_domain(), "s3://b", None, 10).0
    }

    #[test]
    fn a_new_tag_is_sent_after_right_bytes_came_with_it() {
        let (pins, indexed) = (RenewedPins::default(), pin("old"));
        assert_eq!(pins.pin_to_send(KEY, &indexed), indexed);
        assert!(!pins.is_news(KEY, &indexed, &answer("old")));
        assert!(pins.is_news(KEY, &indexed, &answer("new")) && !pins.knows(KEY, &indexed, &answer("new")));
        pins.note(KEY, &indexed, &answer("new"), 0..60);
        assert_eq!(pins.pin_to_send(KEY, &indexed), pin("new"));
        assert!(pins.knows(KEY, &indexed, &answer("new")));
        assert!(pins.is_news(KEY, &indexed, &answer("new")), "a part was not read yet");
        assert_eq!(listed(&pins), []);
        pins.note(KEY, &indexed, &answer("new"), 60..100);
        assert!(!pins.is_news(KEY, &indexed, &answer("new")));
        let rows = listed(&pins);
        assert_eq!(
            (rows.len(), rows[0].path.as_str(), rows[0].new.etag.as_deref()),
            (1, "x", Some("\"new\""))
        );
        // Another version of the dataset has another pin.
        assert_eq!(pins.pin_to_send(KEY, &pin("new")), pin("new"));
        assert!(!pins.knows(KEY, &pin("new"), &answer("new")));
    }

    #[test]
    fn an_object_with_two_tags_is_read_without_a_condition() {
        let (pins, indexed) = (RenewedPins::default(), pin("a"));
        pins.note(KEY, &indexed, &answer("b"), 0..100);
        assert!(pins.is_news(KEY, &indexed, &answer("a")), "the old tag again: there are two servers");
        pins.note(KEY, &indexed, &answer("a"), 0..100);
        let sent = pins.pin_to_send(KEY, &indexed);
        assert_eq!((sent.condition(), sent.size, sent.mtime_ns), (None, 100, None));
        for tag in ["a", "b"] {
            assert!(!pins.is_news(KEY, &indexed, &answer(tag)), "{tag}");
        }
        pins.note(KEY, &indexed, &answer("c"), 0..100);
        assert_eq!(pins.find(KEY, &indexed).expect("known").tags.len(), TAGS_MAX);
    }

    #[test]
    fn a_form_of_the_tag_that_is_never_matched_is_replaced() {
        let (pins, indexed) = (RenewedPins::default(), pin("AB"));
        assert!(pins.is_news(KEY, &indexed, &answer("ab")));
        pins.note(KEY, &indexed, &answer("ab"), 0..100);
        assert_eq!(pins.pin_to_send(KEY, &indexed).condition().as_deref(), Some("\"ab\""));
        assert_eq!(listed(&pins), [], "the tag of the tables proves as much");
        let bare = ObjectMeta { etag: Some("new".into()), ..answer("") };
        pins.note("default\0s3://b\0z", &indexed, &bare, 0..100);
        assert_eq!(pins.pin_to_send("default\0s3://b\0z", &indexed).condition(), None);
        // Answers without any tag: no condition is sent.
        let (untagged, other) = (ObjectMeta { etag: None, ..answer("") }, "default\0s3://b\0y");
        assert!(pins.is_news(other, &indexed, &untagged));
        pins.note(other, &indexed, &untagged, 0..100);
        assert_eq!(pins.pin_to_send(other, &indexed).condition(), None);
        assert!(!pins.is_news(other, &indexed, &untagged));
    }

    #[test]
    fn ranges_are_joined_and_bounded() {
        let mut tag = SeenTag { pin: pin("x"), verified: Vec::new() };
        for range in [40..60, 80..100, 0..10, 10..20, 55..85, 20..40] {
            assert!(!tag.is_complete());
            tag.add(range);
        }
        assert_eq!(tag.verified.len(), 1);
        assert!(tag.is_complete());
        let mut many = SeenTag { pin: pin("x"), verified: Vec::new() };
        (0..2 * RANGES_MAX as u64).rev().for_each(|i| many.add(3 * i..3 * i + 1));
        assert_eq!(many.verified.len(), RANGES_MAX);
        assert!(many.verified.windows(2).all(|w| w[0].end < w[1].start));
    }

    #[test]
    fn pages_are_in_path_order_and_of_one_domain_and_uri() {
        let pins = RenewedPins::default();
        let uri = |text: &str| OriginUri::parse(text).expect("uri");
        let domain = Domain::default_domain();
        for i in [3, 1, 4, 2] {
            let key = object_key(&domain, &uri("s3://bucket-b"), &format!("f{i}"));
            pins.note(&key, &pin("old"), &answer("new"), 0..100);
            pins.note(&object_key(&domain, &uri("s3://bucket-c"), "f"), &pin("old"), &answer("new"), 0..100);
        }
        let paths = |after, max| {
            let (rows, more) = pins.complete(&domain, "s3://bucket-b", after, max);
            (rows.into_iter().map(|row| row.path).collect::<Vec<_>>(), more)
        };
        assert_eq!(paths(None, 3), (vec!["f1".to_owned(), "f2".into(), "f3".into()], true));
        assert_eq!(paths(Some("f3"), 3), (vec!["f4".to_owned()], false));
        let other = "other".parse::<Domain>().expect("domain");
        assert_eq!(pins.complete(&other, "s3://bucket-b", None, 3), (Vec::new(), false));
    }
}
