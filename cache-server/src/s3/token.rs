//! Continuation tokens: where a listing goes on, and in which version.
//!
//! The token has the root of the version in which the last page ended. So a tag that moves meanwhile does not
//! mix two versions in one listing. It grants nothing: the next page checks access like the first one.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use fletch_core::{Hash, Root};

/// The form of tokens.
const FORM: u8 = 1;
const ROOT_BYTES: usize = 32;

/// Where a listing goes on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Continuation {
    /// The version of the dataset in which the key lies. `None`: whatever the tag names.
    pub root: Option<Root>,
    /// The first key that may come, in byte order. It need not be UTF-8.
    pub from: Vec<u8>,
}

impl Continuation {
    /// Returns the token.
    #[must_use]
    pub fn to_token(&self) -> String {
        let root = self.root.map_or([0; ROOT_BYTES], |root| *root.0.as_bytes());
        URL_SAFE_NO_PAD.encode([&[FORM][..], &root, &self.from].concat())
    }

    /// Reads a token; `None` if this server gave no such token.
    #[must_use]
    pub fn read(token: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (form, rest) = bytes.split_first()?;
        let (root, from) = rest.split_at_checked(ROOT_BYTES)?;
        let root = <[u8; ROOT_BYTES]>::try_from(root).ok()?;
        let root = (root != [0; ROOT_BYTES]).then_some(Root(Hash(root)));
        (*form == FORM).then(|| Continuation { root, from: from.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_and_nothing_else_does() {
        let root = Root(Hash::of(b"x"));
        for (root, from) in [(None, &b""[..]), (Some(root), b"d/a\0"), (Some(root), b"\xf4\x90")] {
            let of = Continuation { root, from: from.to_vec() };
            assert_eq!(Continuation::read(&of.to_token()), Some(of));
        }
        for none in ["", "AQ", "a", "key", "!!", "AgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"] {
            assert_eq!(Continuation::read(none), None, "{none}");
        }
    }
}
