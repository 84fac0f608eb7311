//! Objects that no memory and no disk holds: a key, its bytes and its tag come from a number.

/// The keys in one folder.
const FOLDER_KEYS: u64 = 1000;

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
