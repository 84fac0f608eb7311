use super::*;
use rcgen::{CertifiedKey, CertificateParams, Issuer, KeyPair};
use std::path::Path;

/// Returns a certificate of its own CA, as PEM: the certificate, and its key.
fn pair(name: &str) -> (String, String) {
    let made = rcgen::generate_simple_self_signed([name.to_owned()]).expect("made");
    let CertifiedKey { cert, signing_key } = made;
    (cert.pem(), signing_key.serialize_pem())
}

fn files(dir: &Path) -> TlsFiles {
    TlsFiles { cert: dir.join("tls.crt"), key: dir.join("tls.key"), client_ca: None }
}

fn write(files: &TlsFiles, (cert, key): &(String, String)) {
    for (path, text) in [(&files.cert, cert), (&files.key, key)] {
        let part = path.with_extension("part");
        std::fs::write(&part, text).expect("write");
        std::fs::rename(&part, path).expect("rename");
    }
}

fn leaf(tls: &Tls) -> Arc<ServerConfig> {
    tls.active().config
}

#[test]
fn a_fault_names_the_file_and_the_reason() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (files, a, b) = (files(dir.path()), pair("localhost"), pair("localhost"));
    let told = |files: &TlsFiles| Tls::open(files.clone()).expect_err("a fault").to_string();
    let absent = told(&files);
    assert!(absent.contains("tls.cert_file: cannot read") && absent.contains("tls.crt"), "{absent}");
    write(&files, &(a.0.clone(), b.1.clone()));
    let mismatch = told(&files);
    assert!(mismatch.contains("tls.key_file") && mismatch.contains("does not belong"), "{mismatch}");
    write(&files, &(a.0.clone(), a.0.clone()));
    assert!(told(&files).contains("contains no PRIVATE KEY in PEM form"), "{}", told(&files));
    write(&files, &(a.1.clone(), a.1.clone()));
    assert!(told(&files).contains("contains no CERTIFICATE in PEM form"), "{}", told(&files));
    let torn = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned();
    write(&files, &(torn, a.1.clone()));
    assert!(told(&files).contains("cannot be parsed"), "{}", told(&files));
    write(&files, &a);
    let ca = TlsFiles { client_ca: Some(files.key.clone()), ..files.clone() };
    assert!(told(&ca).contains("tls.client_ca_file"), "{}", told(&ca));
    assert!(!Tls::open(files).expect("right").needs_client_certificate());
}

#[test]
fn a_new_pair_comes_into_force_and_a_broken_one_does_not() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (files, a, b) = (files(dir.path()), pair("localhost"), pair("localhost"));
    write(&files, &a);
    let tls = Tls::open(files.clone()).expect("right");
    let first = leaf(&tls);
    tls.reload();
    assert!(Arc::ptr_eq(&first, &leaf(&tls)), "nothing changed");
    write(&files, &(b.0.clone(), a.1.clone()));
    tls.reload();
    tls.reload();
    assert!(Arc::ptr_eq(&first, &leaf(&tls)), "the key does not fit");
    assert_eq!(tls.stats().reload_errors, 1, "each state of the files is told once");
    write(&files, &b);
    tls.reload();
    let second = leaf(&tls);
    assert!(!Arc::ptr_eq(&first, &second));
    std::fs::remove_file(&files.cert).expect("remove");
    tls.reload();
    assert!(Arc::ptr_eq(&second, &leaf(&tls)) && tls.stats().reload_errors == 2);
}

#[test]
fn the_end_of_the_certificate_is_known_and_an_expired_one_is_used() {
    let dir = tempfile::tempdir().expect("tempdir");
    let files = files(dir.path());
    let key = KeyPair::generate().expect("key");
    let mut params = CertificateParams::new(["localhost".to_owned()]).expect("name");
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    let issuer = Issuer::from_params(&params, &key);
    let cert = params.signed_by(&key, &issuer).expect("signed");
    write(&files, &(cert.pem(), key.serialize_pem()));
    let tls = Tls::open(files).expect("a warning only");
    assert_eq!(tls.stats().expires_s, 1_009_843_200);
}
