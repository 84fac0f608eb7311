//! The `[default]` profile of a credentials file. Its values never leave this crate.

use crate::OriginError;
use std::fmt;
use std::path::Path;

/// A key pair, and for temporary ones its token.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct KeyPair {
    pub id: String,
    pub secret: String,
    pub token: Option<String>,
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyPair(redacted)")
    }
}

/// Reads the `[default]` profile (or the lines before any profile) of the file at `path`.
pub(crate) fn load(path: &Path) -> Result<KeyPair, OriginError> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|e| OriginError::invalid(&shown, format!("cannot read credentials: {e}")))?;
    parse(&text).ok_or_else(|| {
        OriginError::invalid(shown, "has no aws_access_key_id and aws_secret_access_key under [default]")
    })
}

fn parse(text: &str) -> Option<KeyPair> {
    let (mut id, mut secret, mut token) = (None, None, None);
    let mut ours = true;
    for line in text.lines().map(str::trim) {
        if let Some(profile) = line.strip_prefix('[') {
            ours = profile.trim_end_matches(']').trim() == "default";
        } else if let (true, Some((key, value))) =
            (ours && !line.starts_with(['#', ';']), line.split_once('='))
        {
            let slot = match key.trim().to_ascii_lowercase().as_str() {
                "aws_access_key_id" => &mut id,
                "aws_secret_access_key" => &mut secret,
                "aws_session_token" => &mut token,
                _ => continue,
            };
            *slot = Some(value.trim().to_owned()).filter(|v| !v.is_empty());
        }
    }
    Some(KeyPair { id: id?, secret: secret?, token })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_profile_is_read_and_never_shown() {
        let text = "# mine\n[other]\naws_access_key_id = no\n[default]\naws_access_key_id = AKIA1\n aws_secret_access_key=hunter2=\n";
        let pair = parse(text).expect("a pair");
        assert_eq!((pair.id.as_str(), pair.secret.as_str(), &pair.token), ("AKIA1", "hunter2=", &None));
        assert!(!format!("{pair:?}").contains("hunter2"));
        assert_eq!(parse("[default]\naws_access_key_id = x\n"), None);
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("c");
        std::fs::write(&path, "aws_secret_access_key = hunter2\n").expect("write");
        let error = load(&path).expect_err("no id");
        assert!(!error.to_string().contains("hunter2"), "{error}");
        assert!(load(&dir.path().join("none")).is_err());
    }
}
