//! Objects as callers see them: metadata, pins, bytes, and how a write treats an object that exists.

use crate::entity_tag::{EntityTag, TagMatch};
use bytes::Bytes;

/// The metadata of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// The path, relative to the origin's URI.
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The time of the last modification, in nanoseconds since 1970. S3 has a precision of seconds.
    pub mtime_ns: Option<i64>,
    /// The entity tag of the store. For a local file, its inode and change time.
    pub etag: Option<String>,
}

impl ObjectMeta {
    /// Returns the pin of this state of the object.
    #[must_use]
    pub fn pin(&self) -> Pin {
        Pin { size: self.size, mtime_ns: self.mtime_ns, etag: self.etag.clone() }
    }
}

/// The state of an object when it was indexed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The size in bytes.
    pub size: u64,
    /// As [`ObjectMeta::mtime_ns`].
    pub mtime_ns: Option<i64>,
    /// As [`ObjectMeta::etag`].
    pub etag: Option<String>,
}

impl Pin {
    /// Returns how an object differs from the pin, or `None` if nothing shows a difference.
    ///
    /// Compares the sizes, then the entity tags by meaning ([`EntityTag::compare`]). If the tags decide
    /// nothing, the times decide, in the coarser precision of the two: a listing may have milliseconds, and a
    /// header has seconds.
    #[must_use]
    pub fn difference(&self, now: &Pin) -> Option<String> {
        if let Some(why) = self.size_difference(now) {
            return Some(why);
        }
        match EntityTag::compare(self.etag.as_deref(), now.etag.as_deref()) {
            TagMatch::Same => None,
            TagMatch::Different => {
                let tag = |pin: &Pin| pin.etag.clone().unwrap_or_default();
                Some(format!("etag {} when it was indexed, {} now", tag(self), tag(now)))
            }
            TagMatch::Undecided if same_time(self.mtime_ns, now.mtime_ns) == Some(false) => {
                Some("its modification time differs".to_owned())
            }
            TagMatch::Undecided => None,
        }
    }

    /// Returns how the size differs.
    pub(crate) fn size_difference(&self, now: &Pin) -> Option<String> {
        let differs = self.size != now.size;
        differs.then(|| format!("{} bytes when it was indexed, {} now", self.size, now.size))
    }

    /// Returns whether the pins prove that two objects of one path have the same bytes: equal sizes and, by
    /// meaning, equal entity tags; without any tag, equal times.
    #[must_use]
    pub fn proves_same(&self, now: &Pin) -> bool {
        let has_tag = |pin: &Pin| pin.etag.as_deref().and_then(EntityTag::parse).is_some();
        self.size == now.size
            && match EntityTag::compare(self.etag.as_deref(), now.etag.as_deref()) {
                TagMatch::Same => true,
                TagMatch::Different => false,
                TagMatch::Undecided => {
                    !has_tag(self) && !has_tag(now) && same_time(self.mtime_ns, now.mtime_ns) == Some(true)
                }
            }
    }

    /// Returns the pin for the later ranges of an object whose first answer was `first`: its tag is in the
    /// form of the store's answers, so that no two versions are mixed.
    #[must_use]
    pub fn of_later_ranges(&self, first: &ObjectMeta) -> Pin {
        let has_tag = first.etag.as_deref().and_then(EntityTag::parse).is_some();
        Pin {
            size: self.size,
            mtime_ns: first.mtime_ns.or(self.mtime_ns),
            etag: if has_tag { first.etag.clone() } else { self.etag.clone() },
        }
    }

    /// Returns the value of `If-Match` that requests this state of the object, if an answer can match it.
    #[must_use]
    pub fn condition(&self) -> Option<String> {
        self.etag.as_deref().and_then(EntityTag::parse)?.condition()
    }
}

/// Returns whether two times are the same in the coarser precision of the two. `None` if one is unknown.
fn same_time(one: Option<i64>, other: Option<i64>) -> Option<bool> {
    let (one, other) = (one?, other?);
    let step_of = |t: i64| {
        let steps = [1_000_000_000, 1_000_000, 1_000];
        steps.into_iter().find(|step| t % step == 0).unwrap_or(1)
    };
    let step = step_of(one).max(step_of(other));
    Some(one.div_euclid(step) == other.div_euclid(step))
}

/// What decides whether an object is the pinned one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinCheck {
    /// Size, tag and time ([`Pin::difference`]).
    Exact,
    /// The size; then the caller, which hashes the bytes.
    SizeThenHash,
}

/// The bytes of a read. There are as many as were requested; they are not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectBytes {
    /// The requested range, or the whole object.
    pub bytes: Bytes,
    /// The metadata of the object, from the same answer.
    ///
    /// For a local file, taken after the read, so that a change during the read shows in it.
    pub meta: ObjectMeta,
}

/// Whether a write may replace an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Creates the object. Fails with [`OriginError::AlreadyExists`](crate::OriginError::AlreadyExists) if it
    /// exists.
    Create,
    /// Creates or replaces the object.
    Overwrite,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(etag: Option<&str>, mtime_ns: Option<i64>) -> Pin {
        Pin { size: 7, mtime_ns, etag: etag.map(str::to_owned) }
    }

    #[test]
    fn size_then_tag_then_time_decide() {
        let second = 1_700_000_000_000_000_000;
        let (finer, later) = (second + 123_000_000, second + 1_000_000_000);
        let cases = [
            (pin(Some("\"a1\""), Some(second)), pin(Some("A1"), Some(later)), true, true),
            (pin(Some("\"a1\""), Some(second)), pin(Some("\"a2\""), Some(second)), false, false),
            // The tag of one side is missing: the times decide, and prove nothing.
            (pin(Some("\"a1\""), Some(finer)), pin(None, Some(second)), true, false),
            (pin(Some("\"a1\""), Some(finer)), pin(Some("\"\""), Some(later)), false, false),
            (pin(Some("\"a1\""), None), pin(None, Some(second)), true, false),
            (pin(None, Some(finer)), pin(None, Some(second)), true, true),
            (pin(None, Some(finer)), pin(None, Some(finer + 1_000_000)), false, false),
            (pin(None, Some(-1)), pin(None, Some(-1_000_000_000)), true, true),
            (pin(None, None), pin(None, None), true, false),
        ];
        for (then, now, is_same, is_proven) in cases {
            for (then, now) in [(&then, &now), (&now, &then)] {
                assert_eq!(then.difference(now).is_none(), is_same, "{then:?} {now:?}");
                assert_eq!(then.proves_same(now), is_proven, "{then:?} {now:?}");
            }
        }
        let longer = Pin { size: 8, ..pin(Some("\"a1\""), None) };
        let same_tag = pin(Some("\"a1\""), None);
        assert_eq!(same_tag.difference(&longer).as_deref(), Some("7 bytes when it was indexed, 8 now"));
        assert!(!same_tag.proves_same(&longer));
    }

    #[test]
    fn later_ranges_are_pinned_to_the_first_answer() {
        let listed = pin(Some("AB"), Some(5));
        let answer = |etag: Option<&str>| ObjectMeta {
            path: "x".into(),
            size: 7,
            mtime_ns: None,
            etag: etag.map(str::to_owned),
        };
        assert_eq!(listed.of_later_ranges(&answer(Some("\"ab\""))), pin(Some("\"ab\""), Some(5)));
        assert_eq!(listed.of_later_ranges(&answer(Some("\"\""))), listed);
        assert_eq!(listed.of_later_ranges(&answer(None)), listed);
    }
}
