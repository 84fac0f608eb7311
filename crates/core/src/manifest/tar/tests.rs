//! The scanner on archives that the `tar` crate wrote, and on archives with false headers.

use super::*;
use ::tar::{Archive, Builder, EntryType, Header as Written};
use proptest::prelude::*;
use std::io::Read;

fn scan(archive: &[u8]) -> Result<Vec<Found>, BadTar> {
    let (mut scanner, mut found) = (TarScanner::new(), Vec::new());
    scanner.feed(archive, &mut found)?;
    scanner.finish()?;
    Ok(found)
}

fn member(name: &str, offset: u64, size: u64) -> Found {
    Found::Member { name: name.into(), offset, size }
}

/// A header of any kind, without the checks of the crate's builder.
fn block(kind: u8, name: &[u8], size: &[u8], edit: impl Fn(&mut [u8; 512])) -> Vec<u8> {
    let mut b = [0u8; 512];
    b[..name.len()].copy_from_slice(name);
    b[124..124 + size.len()].copy_from_slice(size);
    b[156] = kind;
    b[257..265].copy_from_slice(b"ustar\x0000");
    edit(&mut b);
    b[148..156].copy_from_slice(b"        ");
    let sum: u32 = b.iter().map(|x| u32::from(*x)).sum();
    b[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    b.to_vec()
}

fn plain(_: &mut [u8; 512]) {}

fn padded(text: &[u8]) -> Vec<u8> {
    let mut v = text.to_vec();
    v.resize(v.len().next_multiple_of(512), 0);
    v
}

fn pax_header(kind: u8, records: &[u8]) -> Vec<u8> {
    let size = format!("{:011o}\0", records.len());
    [block(kind, b"pax", size.as_bytes(), plain), padded(records)].concat()
}

/// Names, contents, and the way to write each: as the builder does, with pax records, or ustar only.
fn files() -> impl Strategy<Value = Vec<(String, Vec<u8>, u8)>> {
    let name =
        prop_oneof!["[a-zé0-9]{1,20}(/[a-z0-9]{1,40}\\.[a-z]{1,4}){1,2}", "[a-z]{60,120}/[a-z.]{2,90}x"];
    let content = proptest::collection::vec(any::<u8>(), 0..1600);
    proptest::collection::vec((name, content, 0u8..3), 0..12)
}

fn build(files: &[(String, Vec<u8>, u8)]) -> Vec<u8> {
    let mut b = Builder::new(Vec::new());
    for (name, content, how) in files {
        let mut h = if *how == 2 { Written::new_ustar() } else { Written::new_gnu() };
        h.set_size(content.len() as u64);
        h.set_mode(0o644);
        if *how == 1 {
            b.append_pax_extensions([("path", name.as_bytes()), ("comment", b"a=b\nc")]).expect("pax");
            h.set_path("short").expect("fits");
            h.set_cksum();
            b.append(&h, &content[..]).expect("append");
        } else if *how == 2 && h.set_path(name).is_ok() {
            h.set_cksum();
            b.append(&h, &content[..]).expect("append");
        } else {
            let mut h = Written::new_gnu();
            h.set_size(content.len() as u64);
            h.set_mode(0o644);
            b.append_data(&mut h, name, &content[..]).expect("append");
        }
    }
    b.into_inner().expect("archive")
}

proptest! {
    /// The scanner finds the members that the `tar` crate finds.
    ///
    /// Their contents are at the reported offsets, in whatever pieces the bytes come. Contents may be skipped
    /// instead of fed.
    #[test]
    fn finds_what_the_tar_crate_finds(
        files in files(),
        cuts in proptest::collection::vec(1usize..700, 1..8),
        skips in any::<bool>(),
    ) {
        let archive = build(&files);
        let mut want = Vec::new();
        for e in Archive::new(&archive[..]).entries().expect("entries") {
            let mut e = e.expect("entry");
            let name = String::from_utf8(e.path_bytes().into_owned()).expect("text");
            want.push(member(&name, e.raw_file_position(), e.size()));
            let mut content = Vec::new();
            e.read_to_end(&mut content).expect("content");
            prop_assert_eq!(content.len() as u64, e.size());
        }
        let (mut scanner, mut found, mut fed) = (TarScanner::new(), Vec::new(), 0);
        let mut cuts = cuts.iter().cycle();
        while (scanner.position() as usize) < archive.len() {
            let at = scanner.position() as usize;
            if skips && scanner.skippable() > 0 {
                prop_assert!(scanner.skip((archive.len() - at) as u64) > 0);
                continue;
            }
            let end = archive.len().min(at + cuts.next().expect("endless"));
            scanner.feed(&archive[at..end], &mut found).expect("valid");
            fed += end - at;
        }
        prop_assert_eq!(scanner.finish(), Ok(()));
        prop_assert_eq!(&found, &want);
        prop_assert!(!skips || fed <= archive.len());
        for (f, (name, content, _)) in found.iter().zip(&files) {
            let Found::Member { name: got, offset, size } = f else { panic!("a member") };
            prop_assert_eq!(got, name);
            prop_assert_eq!(&archive[*offset as usize..(*offset + *size) as usize], &content[..]);
        }
    }

    /// Damage gives an error or other members, never a panic, and members do not overlap.
    #[test]
    fn damage_is_contained(
        files in files(),
        hits in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        cut in any::<usize>(),
    ) {
        let mut archive = build(&files);
        for (at, to) in hits {
            let at = at % archive.len();
            archive[at] = to;
        }
        archive.truncate(cut % (archive.len() + 1));
        let (mut scanner, mut found) = (TarScanner::new(), Vec::new());
        let fed = scanner.feed(&archive, &mut found);
        let ended = fed.and_then(|()| scanner.finish());
        let mut end = 0;
        for f in &found {
            if let Found::Member { offset, size, .. } = f {
                prop_assert!(*offset >= end + 512 && offset % 512 == 0);
                end = offset.checked_add(*size).expect("no overflow");
            }
        }
        prop_assert!(ended.is_err() || end <= archive.len() as u64);
    }

    #[test]
    fn noise_is_no_archive(mut bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        bytes.splice(0..0, [7]);
        prop_assert!(matches!(scan(&bytes), Err(BadTar::NotTar)));
    }
}

#[test]
fn other_things_are_reported_and_not_followed() {
    let mut b = Builder::new(Vec::new());
    let mut h = Written::new_gnu();
    h.set_entry_type(EntryType::Directory);
    h.set_size(0);
    b.append_data(&mut h, "d/", &[][..]).expect("append");
    let mut h = Written::new_gnu();
    h.set_entry_type(EntryType::Symlink);
    h.set_size(0);
    b.append_link(&mut h, "d/link", "x".repeat(150)).expect("append");
    let mut h = Written::new_gnu();
    h.set_size(3);
    b.append_data(&mut h, "d/1.jpg", &b"abc"[..]).expect("append");
    let archive = b.into_inner().expect("archive");
    let found = scan(&archive).expect("valid");
    let other = |name: &str, what| Found::Other { name: name.into(), what };
    assert_eq!(found[..2], [other("d/", "directory"), other("d/link", "symbolic link")]);
    assert!(matches!(&found[2], Found::Member { name, size: 3, .. } if name == "d/1.jpg"));
    // A hard link's size is that of its target; no bytes follow.
    let linked = [block(b'1', b"h", b"00000001000\0", plain), block(b'0', b"f", b"0", plain)].concat();
    assert_eq!(scan(&linked), Ok(vec![other("h", "hard link"), member("f", 1024, 0)]));
    // v7: a directory is a file whose name ends in a slash.
    let old = block(0, b"old/", b"0", |b| b[257..265].fill(0));
    assert_eq!(scan(&old), Ok(vec![other("old/", "directory")]));
}

#[test]
fn sizes_past_eight_gigabytes() {
    let size = 20u64 << 30;
    let mut binary = [0u8; 12];
    binary[0] = 0x80;
    binary[4..].copy_from_slice(&size.to_be_bytes());
    for header in [
        block(b'0', b"big", &binary, plain),
        [pax_header(b'x', b"20 size=21474836480\n"), block(b'0', b"big", b"0", plain)].concat(),
    ] {
        let (mut s, mut found) = (TarScanner::new(), Vec::new());
        s.feed(&header, &mut found).expect("valid");
        assert_eq!(found, [member("big", header.len() as u64, size)]);
        assert_eq!(s.finish(), Err(BadTar::Short { at: header.len() as u64 }));
        assert_eq!(s.skippable(), size);
        assert_eq!(s.skip(u64::MAX), size);
        s.feed(&block(b'0', b"next", b"0", plain), &mut found).expect("valid");
        assert_eq!(found.len(), 2);
        assert_eq!(s.finish(), Ok(()));
    }
}

#[test]
fn unsupported_archives_are_rejected_with_a_reason() {
    for (magic, name) in [(&b"\x1f\x8b\x08\0"[..], "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh9", "bzip2")]
    {
        let mut long = magic.to_vec();
        long.resize(600, 9);
        assert_eq!(scan(&long), Err(BadTar::Compressed(name)));
        assert_eq!(scan(magic), Err(BadTar::Compressed(name)), "short");
        assert!(scan(&long).expect_err("rejected").to_string().contains("Decompress"));
    }
    assert_eq!(scan(b""), Err(BadTar::NotTar));
    assert_eq!(scan(b"short"), Err(BadTar::NotTar));
    let zero = b"00000000000\0";
    let sparse = BadTar::Unsupported { offset: 0, what: "a sparse file" };
    assert_eq!(scan(&block(b'S', b"s", zero, plain)), Err(sparse.clone()));
    assert_eq!(scan(&pax_header(b'x', b"22 GNU.sparse.major=1\n")), Err(sparse));
    let volume = BadTar::Unsupported { offset: 0, what: "a volume of several" };
    assert_eq!(scan(&block(b'M', b"s", zero, plain)), Err(volume));
    let unknown = BadTar::Unsupported { offset: 0, what: "a member of unknown kind" };
    assert_eq!(scan(&block(b'Z', b"s", zero, plain)), Err(unknown));
    for name in [&b""[..], b"\xff\xfe"] {
        assert_eq!(scan(&block(b'0', name, zero, plain)), Err(BadTar::Name { offset: 0 }));
    }
    let with_nul = [pax_header(b'x', b"12 path=a\0b\n"), block(b'0', b"s", zero, plain)].concat();
    assert_eq!(scan(&with_nul), Err(BadTar::Name { offset: 1024 }));
    for bad in [
        pax_header(b'x', b"nonsense"),
        pax_header(b'x', b"99 path=a\n"),
        pax_header(b'x', b"10 size=x\n"),
        pax_header(b'g', b"10 path=x\n"),
        block(b'x', b"p", b"00077777777\0", plain),
        block(b'0', b"huge", b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", plain),
        block(b'0', b"huge", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", plain),
    ] {
        let good = block(b'0', b"first", zero, plain);
        let second = scan(&[good, bad].concat());
        assert!(matches!(second, Err(BadTar::Header { offset: 512, .. })), "{second:?}");
    }
    // A bad later header is damage, not the end.
    let mut second = [block(b'0', b"a", zero, plain), block(b'0', b"b", zero, plain)].concat();
    second[512] ^= 1;
    assert!(matches!(scan(&second), Err(BadTar::Header { offset: 512, .. })));
}

#[test]
fn an_archive_ends_at_zeros_or_after_a_member() {
    let one = [block(b'0', b"a", b"00000000003\0", plain), padded(b"abc")].concat();
    let found = vec![member("a", 512, 3)];
    assert_eq!(scan(&one), Ok(found.clone()));
    let noise = [one.clone(), vec![0; 512], vec![9; 700]].concat();
    assert_eq!(scan(&noise), Ok(found), "bytes after the end are ignored");
    for cut in [1, 511, 513, 515, 1023] {
        let short = scan(&one[..cut]);
        let want = if cut < 512 { BadTar::NotTar } else { BadTar::Short { at: cut as u64 } };
        assert_eq!(short, Err(want), "{cut}");
    }
    let dangling = pax_header(b'x', b"10 path=x\n");
    assert_eq!(scan(&dangling), Err(BadTar::Short { at: 1024 }));
}
