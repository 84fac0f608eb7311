use super::*;
use proptest::prelude::*;

fn key() -> StoreKey {
    StoreKey { domain: Domain::new("vision-team").expect("a name"), hash: Hash::of(b"abc") }
}

fn block(b: &[u8]) -> Block {
    b.try_into().expect("a block")
}

/// Slab 7 with one record `abc` of dataset 42, sealed.
fn sealed() -> Vec<u8> {
    let mut f = slab_header(7).to_vec();
    f.extend_from_slice(&record_header(7, &key(), 42, 3));
    f.extend_from_slice(b"abc");
    f.resize(832, 0);
    let row = Row { hash: key().hash, dataset: 42, at: 512, len: 3, domain: 0 };
    let (table, check) = seal(7, 832, &Table { domains: vec![key().domain], rows: vec![row] });
    assert_eq!(check, table[table.len() - 512 + 40..][..8]);
    f.extend_from_slice(&table);
    f
}

#[test]
fn the_format_is_the_golden_file() {
    let golden = include_bytes!("golden.slab");
    assert!(sealed() == golden, "the slab format has changed: that needs a new major version");
    // The fields, as FORMATS says where they are.
    assert_eq!(golden[..8], *b"FLETCHSL");
    assert_eq!(golden[512..520], *b"FLRC\x01\x01\x0b\x00");
    assert_eq!(golden[512 + 24..512 + 28], 3u32.to_le_bytes());
    assert_eq!(golden[512 + 32..512 + 64], Hash::of(b"abc").0);
    assert_eq!(golden[512 + 64..512 + 75], *b"vision-team");
    assert_eq!(golden[768..771], *b"abc");
    assert_eq!(golden[832..840], *b"FLETCHTB");
    assert_eq!(golden[1344..1352], *b"FLETCHFT");
    assert_eq!(golden.len(), 1856);
}

#[test]
fn a_sealed_slab_reads_back() {
    let f = sealed();
    assert_eq!(check_slab_header(&block(&f[..512]), 7), Ok(()));
    assert_eq!(check_slab_header(&block(&f[..512]), 8), Err(BadSlab::OtherSlab));
    let r = read_record(&f[512..], 7).expect("a record");
    assert_eq!(r, RecordHeader { slab: 7, key: key(), dataset: 42, len: 3 });
    assert_eq!(read_record(&f[512..], 8), Err(BadSlab::OtherSlab));
    let footer = read_footer(&block(&f[1344..]), 7, 1856).expect("a footer");
    let table = read_table(&f[832..832 + footer.table_len as usize], &footer).expect("a table");
    assert_eq!(table.domains, [key().domain]);
    assert_eq!(table.rows, [Row { hash: key().hash, dataset: 42, at: 512, len: 3, domain: 0 }]);
    assert!(padded(footer.table_len) + BLOCK <= table_bytes(1, domain_bytes(&key().domain)));
}

#[test]
fn every_flipped_bit_of_what_is_checked_is_noticed() {
    let f = sealed();
    let read = |f: &[u8]| {
        check_slab_header(&block(&f[..512]), 7)?;
        read_record(&f[512..], 7)?;
        let footer = read_footer(&block(&f[1344..]), 7, 1856)?;
        read_table(&f[832..832 + footer.table_len as usize], &footer).map(drop)
    };
    assert_eq!(read(&f), Ok(()));
    for range in [0..32, 512..512 + 200, 832..832 + 24, 856..928, 1344..1344 + 88] {
        for at in range {
            for bit in 0..8 {
                let mut g = f.clone();
                g[at] ^= 1 << bit;
                assert!(read(&g).is_err(), "bit {bit} of byte {at}");
            }
        }
    }
}

#[test]
fn another_major_says_so() {
    for major in [1, 3] {
        let mut b = slab_header(7);
        b[8] = major;
        let check = check8(CONTEXT_SLAB, &b[..24]);
        b[24..32].copy_from_slice(&check);
        assert_eq!(check_slab_header(&b, 7), Err(BadSlab::Major(major.into())));
    }
}

/// Bytes with right checks over nonsense: what a defect or an attacker would leave.
fn footer_of(table: &[u8], count: u32, table_at: u64) -> Footer {
    Footer {
        slab: 7,
        table_at,
        table_len: table.len() as u64,
        count,
        table_hash: derive(CONTEXT_TABLE, table),
    }
}

proptest! {
    #[test]
    fn nothing_panics_on_nonsense(
        mut table in prop::collection::vec(any::<u8>(), 0..400),
        count: u32,
        domains in 0u16..4,
        at: u64,
    ) {
        drop(read_table(&table, &footer_of(&table, count, at)));
        drop(read_record(&table, 7));
        if table.len() >= 24 {
            table[..8].copy_from_slice(&TABLE_MAGIC);
            table[8..16].copy_from_slice(&7u64.to_le_bytes());
            table[20..22].copy_from_slice(&domains.to_le_bytes());
            for count in 0..8u32 {
                table[16..20].copy_from_slice(&count.to_le_bytes());
                drop(read_table(&table, &footer_of(&table, count, at)));
            }
        }
    }

    #[test]
    fn tables_never_overlap_or_leave_the_file(
        ats in prop::collection::vec(0u64..512, 1..6),
        lens in prop::collection::vec(0u32..4096, 6),
        end in 8u64..512,
    ) {
        let row = |(a, l): (&u64, &u32)| Row {
            hash: Hash::of(&a.to_le_bytes()),
            dataset: 1,
            at: a * LINE,
            len: *l,
            domain: 0,
        };
        let rows: Vec<_> = ats.iter().zip(&lens).map(row).collect();
        let table = Table { domains: vec![key().domain], rows };
        let (bytes, _) = seal(7, end * LINE, &table);
        let len = end * LINE + bytes.len() as u64;
        let footer = read_footer(&block(&bytes[bytes.len() - 512..]), 7, len).expect("a footer");
        let mut sane = true;
        let mut from = BLOCK;
        for r in &table.rows {
            sane &= r.at >= from && r.at + footprint(r.len) <= end * LINE;
            from = r.at + footprint(r.len);
        }
        prop_assert_eq!(read_table(&bytes[..footer.table_len as usize], &footer).is_ok(), sane);
    }
}
