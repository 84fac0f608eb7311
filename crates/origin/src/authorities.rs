//! The certificate authorities that an origin's servers may have, besides those of the system.

use crate::{OriginConfig, OriginError};
use std::path::Path;
use std::sync::Arc;

/// The most bytes of authorities of one origin.
pub const AUTHORITIES_BYTES_MAX: usize = 1 << 20;

/// Returns the authorities of an origin as PEM text; `None` if it names none.
pub(crate) fn of(config: &OriginConfig) -> Result<Option<Arc<str>>, OriginError> {
    let mut all = String::new();
    if let Some(path) = &config.ca_file {
        all += &read_authorities(path)?;
    }
    if let Some(pem) = &config.ca_certificates {
        check(pem)
            .map_err(|why| OriginError::invalid(format!("ca_certificates of {}", config.prefix), why))?;
        all += pem;
    }
    Ok((!all.is_empty()).then(|| all.into()))
}

/// Reads a PEM file with certificate authorities.
///
/// # Errors
/// The file cannot be read, is too long, or has no certificate or one that is not valid.
pub fn read_authorities(path: &Path) -> Result<String, OriginError> {
    let cannot = |why: String| {
        let why = format!("the file with certificate authorities cannot be used: {why}");
        OriginError::invalid(path.display(), why)
    };
    let (file, meta) = crate::regular_file::open_regular(path).map_err(|e| cannot(e.to_string()))?;
    if meta.len() > AUTHORITIES_BYTES_MAX as u64 {
        return Err(cannot(too_long(meta.len())));
    }
    let text = std::io::read_to_string(file).map_err(|e| cannot(e.to_string()))?;
    check(&text).map_err(cannot)?;
    Ok(text)
}

fn too_long(bytes: u64) -> String {
    format!("it has {bytes} bytes, at most {AUTHORITIES_BYTES_MAX} are allowed")
}

/// Checks that a text has certificates in PEM form, and that each can be read.
pub(crate) fn check(pem: &str) -> Result<(), String> {
    if pem.len() > AUTHORITIES_BYTES_MAX {
        return Err(too_long(pem.len() as u64));
    }
    let mut found = 0;
    for (number, block) in x509_parser::pem::Pem::iter_from_buffer(pem.as_bytes()).enumerate() {
        let bad = || format!("its certificate {} is not valid", number + 1);
        let block = block.map_err(|_| bad())?;
        // Bundles may have other blocks, such as comments of a key.
        if block.label == "CERTIFICATE" {
            block.parse_x509().map_err(|_| bad())?;
            found += 1;
        }
    }
    if found == 0 {
        return Err("it has no certificate in PEM form (-----BEGIN CERTIFICATE-----)".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_without_a_valid_certificate_is_rejected() {
        let good = std::fs::read_to_string(fletch_testkit::tls::authority()).expect("a certificate");
        assert_eq!(check(&good), Ok(()));
        assert_eq!(check(&format!("# mine\n{good}\n{good}")), Ok(()));
        for (bad, why) in [
            ("", "no certificate"),
            ("hunter2", "no certificate"),
            (
                "-----BEGIN CERTIFICATE-----\naHVudGVyMg==\n-----END CERTIFICATE-----\n",
                "certificate 1 is not",
            ),
            (&"x".repeat(AUTHORITIES_BYTES_MAX + 1), "at most 1048576"),
        ] {
            let error = check(bad).expect_err(why);
            assert!(error.contains(why) && !error.contains("hunter2"), "{error}");
        }
        let missing = read_authorities(Path::new("/none/ca.pem")).expect_err("no file").to_string();
        assert!(missing.starts_with("/none/ca.pem: the file with certificate authorities"), "{missing}");
    }
}
