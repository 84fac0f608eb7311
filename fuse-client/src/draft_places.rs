//! What a mount remembers of a draft: the hashes of the bytes that it read by the names of their places.
//!
//! 1. (I1) The first bytes of a place are hashed, and the hash is what the server says. Later bytes of the
//!    place are checked against it, so that two reads never see two different contents.
//! 2. (I6) Soft, and bounded by [`PLACES_MAX`]. A place that was forgotten is as one that was never read.

use fletch_core::{Hash, Kind, StoreKey, Verified};
use fletch_store::{FetchError, Names};
use moka::sync::Cache;

/// The most places that are remembered: about 16 MiB.
const PLACES_MAX: u64 = 100_000;

/// The places that were read.
#[derive(Debug)]
pub struct DraftPlaces {
    content: Cache<Hash, Hash>,
    /// What the server says of bytes that are not hashed yet.
    said: Cache<Hash, Hash>,
}

impl Default for DraftPlaces {
    fn default() -> Self {
        DraftPlaces { content: Cache::new(PLACES_MAX), said: Cache::new(PLACES_MAX) }
    }
}

impl DraftPlaces {
    /// Notes what the server says that the bytes of a place hash to.
    pub fn note_said(&self, name: Hash, content: Hash) {
        self.said.insert(name, content);
    }
}

impl Names for DraftPlaces {
    fn content(&self, name: &StoreKey) -> Option<Hash> {
        self.content.get(&name.hash)
    }

    fn learn(&self, name: &StoreKey, bytes: &Verified) -> Result<(), FetchError> {
        let said = self.said.remove(&name.hash);
        if said.is_some_and(|said| said != bytes.hash()) {
            let why = format!("other bytes came than the server says, of place {}", name.hash.short());
            return Err(FetchError::new(Kind::Corrupt, why));
        }
        let known = self.content.get_with(name.hash, || bytes.hash());
        if known == bytes.hash() {
            return Ok(());
        }
        let why = format!("other bytes came than before, of place {}", name.hash.short());
        Err(FetchError::new(Kind::Corrupt, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use fletch_core::Domain;

    #[test]
    fn i1_a_place_has_one_content() {
        let places = DraftPlaces::default();
        let name = StoreKey { domain: Domain::default_domain(), hash: Hash::of(b"a place") };
        let (bytes, others) =
            (Verified::of(Bytes::from_static(b"a")), Verified::of(Bytes::from_static(b"b")));
        places.note_said(name.hash, others.hash());
        assert!(places.learn(&name, &bytes).is_err(), "the server says something else");
        assert_eq!(places.content(&name), None);
        places.note_said(name.hash, bytes.hash());
        places.learn(&name, &bytes).expect("the first bytes");
        assert_eq!(places.content(&name), Some(bytes.hash()));
        places.note_said(name.hash, others.hash());
        assert!(places.learn(&name, &others).is_err(), "a place never changes");
    }
}
