//! Objects that no memory and no disk holds: a key, its bytes and its tag come from a number.

/// The keys in one folder.
const FOLDER_KEYS: u64 = 1000;
/// The distance between neighbours of a listing without order. It is prime, so it meets every object once.
const STRIDE: u64 = 7919;

/// The objects `set/FOLDER/NUMBER`, in byte order of their keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Generated {
    /// The number of objects, at most 1e9.
    pub keys: u64,
    /// The size of each object, in bytes.
    pub bytes: u64,
}

impl Generated {
    /// Returns a key by its number.
    pub fn key(number: u64) -> String {
        format!("set/{:06}/{number:09}", number / FOLDER_KEYS)
    }

    /// Whether there is an object with this key.
    pub fn has(self, key: &str) -> bool {
        let number = key.rsplit('/').next().and_then(|name| name.parse().ok());
        number.is_some_and(|number| number < self.keys && Self::key(number) == key)
    }

    /// Returns all keys after a key, in an order that is not theirs.
    ///
    /// # Panics
    /// If the number of objects is a multiple of [`STRIDE`].
    pub fn shuffled(self, after: Option<&str>) -> impl Iterator<Item = String> {
        assert_ne!(self.keys % STRIDE, 0, "{} objects are no multiple of {STRIDE}", self.keys);
        let at = move |position: u64| position * STRIDE % self.keys;
        let number = after.and_then(|key| key.rsplit('/').next()?.parse().ok());
        // The position of a number: `position * STRIDE = number + n * keys` for one `n`.
        let begin = number.map_or(0, |number: u64| {
            let found = (0..STRIDE).find(|n| (number + n * self.keys).is_multiple_of(STRIDE));
            (number + found.unwrap_or(0) * self.keys) / STRIDE + 1
        });
        (begin..self.keys).map(move |position| Self::key(at(position)))
    }

    /// Returns the keys with a prefix and after a key.
    pub fn after(self, prefix: &str, after: Option<&str>) -> impl Iterator<Item = String> {
        let before = |key: &str| key < prefix || after.is_some_and(|after| key <= after);
        let (mut low, mut high) = (0, self.keys);
        while low < high {
            let middle = low + (high - low) / 2;
            if before(&Self::key(middle)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (low..self.keys).map(Self::key).take_while(move |key| key.starts_with(prefix))
    }
}
