//! Values of each type, lists that claim more than they have, and fields of other types.

use super::*;

const PLAIN: Fields =
    &[(1, Kind::I32), (2, Kind::List(&Kind::Binary)), (4, Kind::Struct(&[(1, Kind::Bool)]))];

fn copied(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    Reader::new(bytes).copy(PLAIN, &mut out)?;
    Ok(out)
}

#[test]
fn known_fields_are_copied_and_others_dropped() {
    let known = [0x15, 0x08, 0x19, 0x28, 0x01, b'a', 0x00, 0x2c, 0x11, 0x00, 0x00];
    assert_eq!(copied(&known).expect("known"), known);
    // Field 3, of each type, between fields 2 and 4.
    let others: [&[u8]; 11] = [
        &[0x11],
        &[0x12],
        &[0x13, 9],
        &[0x14, 0x80, 0x01],
        &[0x17, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0x18, 2, b'x', b'y'],
        &[0x19, 0x21, 1, 2],
        &[0x1a, 0x15, 3],
        &[0x1b, 1, 0x58, 7, 1, b'z'],
        &[0x1c, 0x15, 1, 0],
        &[0x1d, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    ];
    for other in others {
        let mut bytes = known[..7].to_vec();
        bytes.extend_from_slice(other);
        bytes.extend_from_slice(&[0x1c, 0x11, 0x00, 0x00]);
        assert_eq!(copied(&bytes).expect("dropped"), known, "{other:?}");
    }
}

#[test]
fn a_list_has_no_more_elements_than_bytes() {
    // A list of 2^31 - 1 booleans in an unknown field, and 14 such lists within a list.
    let booleans = [0xf1, 0xff, 0xff, 0xff, 0xff, 0x07];
    let mut bytes = vec![0x39];
    bytes.extend_from_slice(&booleans);
    bytes.push(0);
    assert!(copied(&bytes).is_err());
    let nested = [&[0x39, 0xe9][..], &booleans.repeat(14), &[0]].concat();
    assert!(copied(&nested).is_err());
    let pairs = [0x3b, 0xff, 0xff, 0xff, 0xff, 0x07, 0x11, 0x00];
    assert!(copied(&pairs).is_err(), "a map of booleans");
    assert!(copied(&[&[0x39, 0x19].repeat(40)[..], &[0]].concat()).is_err(), "deeply nested");
}

#[test]
fn a_known_field_has_its_type_and_its_place() {
    for (bytes, what) in [
        (&[0x16, 0x08, 0x00][..], "64 bits for 32"),
        (&[0x19, 0x15, 0x08, 0x00], "a list for a number"),
        (&[0x29, 0x15, 0x08, 0x00], "a list of numbers"),
        (&[0x4c, 0x15, 0x08, 0x00, 0x00], "a number for a boolean"),
        (&[0x15, 0xff, 0xff, 0xff, 0xff, 0x7f, 0x00], "a number over 32 bits"),
        (&[0x15, 0x08, 0x05, 0x02, 0x08, 0x00], "the same field again"),
        (&[0x15, 0x08], "no end"),
        (&[0x15, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00], "eleven bytes"),
        (&[0x3e, 0x00], "a type that does not exist"),
        (&[], "nothing"),
    ] {
        assert!(copied(bytes).is_err(), "{what}");
    }
    assert_eq!(copied(&[0x05, 0x02, 0x08, 0x00]).expect("long form"), [0x15, 0x08, 0x00]);
}
