use super::*;
use fletch_testkit::tls::{Authority, PemPair};
use std::path::Path;

fn files(dir: &Path) -> TlsFiles {
    TlsFiles { cert: dir.join("tls.crt"), key: dir.join("tls.key"), client_ca: None }
}

fn pair() -> PemPair {
    Authority::new("tests").server(&["localhost"], 4000)
}

fn write(dir: &Path, cert: &str, key: &str) {
    let _ = PemPair { cert: cert.to_owned(), key: key.to_owned() }.write(dir, "tls");
}

#[test]
fn a_fault_names_the_file_and_the_reason() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (dir, files, a, b) = (dir.path(), files(dir.path()), pair(), pair());
    let told = |files: &TlsFiles| Tls::open(files.clone()).expect_err("a fault").to_string();
    let absent = told(&files);
    assert!(absent.contains("tls.cert_file: cannot read") && absent.contains("tls.crt"), "{absent}");
    write(dir, &a.cert, &b.key);
    let mismatch = told(&files);
    assert!(mismatch.contains("tls.key_file") && mismatch.contains("does not belong"), "{mismatch}");
    write(dir, &a.cert, &a.cert);
    assert!(told(&files).contains("contains no PRIVATE KEY in PEM form"), "{}", told(&files));
    write(dir, &a.key, &a.key);
    assert!(told(&files).contains("contains no CERTIFICATE in PEM form"), "{}", told(&files));
    write(dir, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &a.key);
    assert!(told(&files).contains("cannot be parsed"), "{}", told(&files));
    write(dir, &a.cert, &a.key);
    let ca = TlsFiles { client_ca: Some(files.key.clone()), ..files.clone() };
    assert!(told(&ca).contains("tls.client_ca_file"), "{}", told(&ca));
    assert!(!Tls::open(files).expect("right").needs_client_certificate());
}

#[test]
fn a_new_pair_comes_into_force_and_a_broken_one_does_not() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (dir, files, a, b) = (dir.path(), files(dir.path()), pair(), pair());
    write(dir, &a.cert, &a.key);
    let tls = Tls::open(files.clone()).expect("right");
    let (config, first) = (|| tls.active().config, tls.active().config);
    tls.reload();
    assert!(Arc::ptr_eq(&first, &config()), "nothing changed");
    write(dir, &b.cert, &a.key);
    tls.reload();
    tls.reload();
    assert!(Arc::ptr_eq(&first, &config()), "the key does not fit");
    assert_eq!(tls.stats().reload_errors, 1, "each state of the files is told once");
    write(dir, &b.cert, &b.key);
    tls.reload();
    let second = config();
    assert!(!Arc::ptr_eq(&first, &second));
    std::fs::remove_file(&files.cert).expect("remove");
    tls.reload();
    assert!(Arc::ptr_eq(&second, &config()) && tls.stats().reload_errors == 2);
}

#[test]
fn the_end_of_the_certificate_is_known_and_an_expired_one_is_used() {
    let dir = tempfile::tempdir().expect("tempdir");
    let expired = Authority::new("tests").server(&["localhost"], 2002);
    write(dir.path(), &expired.cert, &expired.key);
    let tls = Tls::open(files(dir.path())).expect("a warning only");
    assert_eq!(tls.stats().expires_s, 1_041_292_800, "2002-12-31");
}
