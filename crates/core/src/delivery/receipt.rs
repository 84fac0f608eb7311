//! Receipts: what an epoch delivered, as one value that does not depend on the order of deliveries and can be
//! added up over ranks (`docs/FORMATS-epochs.md`, "Receipt").
//!
//! The value is LtHash (Bellare and Micciancio, EUROCRYPT '97; as in Lewi et al., "Securing Update
//! Propagation with Homomorphic Hashing", 2019). Each delivered copy is hashed to 1,024 lanes of 16 bits with
//! BLAKE3's XOF, and the lanes are added modulo 2^16. A missing, doubled or altered delivery changes the sum.
//!
//! I1. Adding the same deliveries in any order and any grouping gives the same value.
//! I2. A delivery's hash covers the root, the sample's first ordinal, the BLAKE3 of the received bytes, and
//!     the copy. So a client that has the manifest can compute the value of a plan without the data.

use crate::hash::context;
use crate::{Hash, Root};
use serde::{Deserialize, Serialize};

/// Lanes of a value.
pub const LANES: usize = 1024;
/// Bytes of a value.
pub const VALUE_BYTES: usize = 2 * LANES;
/// The format's major version.
pub const FORMAT_MAJOR: u32 = 1;

/// The sum of a set of deliveries.
#[derive(Clone, PartialEq, Eq)]
pub struct LtHash {
    lanes: Box<[u16; LANES]>,
}

impl std::fmt::Debug for LtHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LtHash({})", self.digest().short())
    }
}

impl Default for LtHash {
    fn default() -> Self {
        LtHash { lanes: Box::new([0; LANES]) }
    }
}

/// One delivered copy of one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Ordinal of the sample's first entry.
    pub ordinal: u64,
    /// Plain BLAKE3 of the received bytes. For a sample of several entries, BLAKE3 of their hashes, one after
    /// the other ([`content`]).
    pub content: Hash,
    /// The number of the copy ([`crate::plan::Item::copy`]).
    pub copy: u32,
}

/// Returns the content hash of a sample from the hashes of its entries, in order. For one entry it is the
/// entry's own hash, else BLAKE3 of all hashes, one after the other.
#[must_use]
pub fn content(entries: &[Hash]) -> Hash {
    match entries {
        [one] => *one,
        many => {
            let mut h = blake3::Hasher::new();
            many.iter().for_each(|e| {
                h.update(e.as_bytes());
            });
            h.finalize().into()
        }
    }
}

impl LtHash {
    fn lanes_of(root: Root, d: &Delivery) -> [u8; VALUE_BYTES] {
        let mut h = blake3::Hasher::new_derive_key(context::RECEIPT);
        h.update(root.0.as_bytes());
        h.update(&d.ordinal.to_le_bytes());
        h.update(d.content.as_bytes());
        h.update(&d.copy.to_le_bytes());
        let mut out = [0; VALUE_BYTES];
        h.finalize_xof().fill(&mut out);
        out
    }

    /// Adds one delivery, in about 2 µs.
    pub fn add(&mut self, root: Root, d: &Delivery) {
        for (lane, x) in self.lanes.iter_mut().zip(Self::lanes_of(root, d).chunks_exact(2)) {
            *lane = lane.wrapping_add(u16::from_le_bytes([x[0], x[1]]));
        }
    }

    /// Subtracts one delivery.
    pub fn remove(&mut self, root: Root, d: &Delivery) {
        for (lane, x) in self.lanes.iter_mut().zip(Self::lanes_of(root, d).chunks_exact(2)) {
            *lane = lane.wrapping_sub(u16::from_le_bytes([x[0], x[1]]));
        }
    }

    /// Adds another sum, such as that of another rank.
    pub fn merge(&mut self, other: &LtHash) {
        for (lane, x) in self.lanes.iter_mut().zip(other.lanes.iter()) {
            *lane = lane.wrapping_add(*x);
        }
    }

    /// Returns the value's bytes: the lanes in order, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.lanes.iter().flat_map(|l| l.to_le_bytes()).collect()
    }

    /// Reads a value. Returns `None` unless there are [`VALUE_BYTES`] bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != VALUE_BYTES {
            return None;
        }
        let mut out = LtHash::default();
        for (lane, x) in out.lanes.iter_mut().zip(bytes.chunks_exact(2)) {
            *lane = u16::from_le_bytes([x[0], x[1]]);
        }
        Some(out)
    }

    /// Returns the BLAKE3 of the value: short enough to compare by eye.
    #[must_use]
    pub fn digest(&self) -> Hash {
        Hash::of(&self.to_bytes())
    }
}

impl Serialize for LtHash {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&hex::encode(self.to_bytes()))
    }
}

impl<'de> Deserialize<'de> for LtHash {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        hex::decode(&text)
            .ok()
            .and_then(|b| LtHash::from_bytes(&b))
            .ok_or_else(|| serde::de::Error::custom("a receipt's value is 2,048 bytes in hex"))
    }
}

/// The server's statement, at the end of an epoch, of what the epoch had to deliver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// "fletch.receipt".
    pub format: String,
    /// [`FORMAT_MAJOR`].
    pub major: u32,
    /// The format's minor version. Older readers may ignore its additions.
    pub minor: u32,
    /// The version that was delivered.
    pub root: Root,
    /// The plan's hash.
    pub plan: Hash,
    /// The job's seed.
    pub seed: u64,
    /// The epoch's number.
    pub epoch: u64,
    /// Copies delivered.
    pub delivered: u64,
    /// Entries that were granted again, because a lease expired or the epoch was rolled back.
    pub redelivered: u64,
    /// Entries that the tail rule left out.
    pub dropped: Vec<u32>,
    /// Pads: entries that only fill up the last step.
    pub padded: u32,
    /// The sum of the deliveries.
    pub value: LtHash,
    /// The key of the signature. No server signs yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// The signature in hex, over the canonical JSON without it. No server signs yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<String>,
}

impl Receipt {
    /// Returns whether the receipt states this number of deliveries and this sum.
    #[must_use]
    pub fn agrees(&self, delivered: u64, value: &LtHash) -> bool {
        self.delivered == delivered && self.value == *value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn d(i: u64) -> Delivery {
        Delivery { ordinal: i / 2, content: Hash::of(&i.to_le_bytes()), copy: (i % 2) as u32 }
    }

    proptest! {
        #[test]
        fn sums_do_not_depend_on_order_or_ranks(n in 1u64..40, ranks in 1u64..5, turn in 0u64..40) {
            let root = Root(Hash::of(b"r"));
            let mut whole = LtHash::default();
            (0..n).for_each(|i| whole.add(root, &d(i)));
            let mut parts = vec![LtHash::default(); ranks as usize];
            for i in 0..n {
                let j = (i * 7 + turn) % n;
                if n % 7 != 0 {
                    parts[(j % ranks) as usize].add(root, &d(j));
                } else {
                    parts[0].add(root, &d(i));
                }
            }
            let mut sum = LtHash::default();
            parts.iter().for_each(|p| sum.merge(p));
            prop_assert_eq!(&sum, &whole);
            prop_assert_eq!(LtHash::from_bytes(&sum.to_bytes()), Some(sum.clone()));
            // A lost, a doubled and an altered delivery.
            let i = turn % n;
            let mut bad = whole.clone();
            bad.remove(root, &d(i));
            prop_assert_ne!(&bad, &whole);
            let mut bad = whole.clone();
            bad.add(root, &d(i));
            prop_assert_ne!(&bad, &whole);
            for other in [
                Delivery { copy: 9, ..d(i) },
                Delivery { ordinal: 99, ..d(i) },
                Delivery { content: Hash::of(b"x"), ..d(i) },
            ] {
                let mut bad = whole.clone();
                bad.remove(root, &d(i));
                bad.add(root, &other);
                prop_assert_ne!(&bad, &whole);
            }
        }
    }

    #[test]
    fn doubling_2_to_16_times_is_noticed_by_the_count() {
        let mut v = LtHash::default();
        let root = Root(Hash::of(b"r"));
        v.add(root, &d(1));
        let one = v.clone();
        for _ in 0..16 {
            let twice = v.clone();
            v.merge(&twice);
        }
        assert_eq!(v, LtHash::default(), "lanes are modulo 2^16");
        let r = Receipt {
            format: "fletch.receipt".into(),
            major: 1,
            minor: 0,
            root,
            plan: Hash::of(b"p"),
            seed: 0,
            epoch: 0,
            delivered: 1,
            redelivered: 0,
            dropped: vec![],
            padded: 0,
            value: one.clone(),
            key_id: None,
            signature: None,
        };
        assert!(r.agrees(1, &one) && !r.agrees(1 + (1 << 16), &one));
        let text = serde_json::to_string(&r).expect("json");
        assert_eq!(serde_json::from_str::<Receipt>(&text).expect("json"), r);
        assert!(serde_json::from_str::<LtHash>("\"00\"").is_err());
        assert_eq!(content(&[Hash::of(b"a")]), Hash::of(b"a"));
        assert_ne!(content(&[Hash::of(b"a"), Hash::of(b"b")]), content(&[Hash::of(b"b"), Hash::of(b"a")]));
    }
}
