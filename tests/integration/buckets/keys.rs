//! Keys that are no paths, keys that are odd paths, and how a listing writes them.

use crate::form::{Form, check};
use fletch_testkit::dataset::ODD_NAMES;
use fletch_testkit::{Api, KeyEncoding, Manners, XmlForm};

#[test]
fn keys_and_how_a_listing_writes_them() {
    let long = format!("{}x", "n".repeat(255));
    let odd: Vec<String> = ODD_NAMES.iter().map(|name| format!("odd/{name}")).collect();
    let odd: Vec<&str> = odd.iter().map(String::as_str).chain(["bell\u{7}", "tab\tand\rreturn"]).collect();
    let xml = |xml| Manners { xml, ..Manners::default() };
    let encoding = |encoding| Manners { encoding, ..Manners::default() };
    let fault = |name, key| Form::faults(name, &["a", key, "z"], &["a", "z"], &[key]);
    check(&[
        fault("a double slash", "x//y"),
        fault("a component that is a dot", "x/./y"),
        fault("components that lead up", "x/../y"),
        fault("a leading slash", "/lead"),
        fault("a component of 256 bytes", &long),
        Form::faults("a NUL byte", &["a", "nul\0x", "z"], &["a", "z"], &["nul\\0x"])
            .with(encoding(KeyEncoding::Always)),
        Form::faults(
            "all of them together",
            &["/lead", "a", "b//c", "b/./d", "b/../e", "full/", "z"],
            &["a", "z"],
            &["/lead", "b//c", "b/./d", "b/../e", "full/"],
        ),
        Form::entries("a key with a line break", &["new\nline", "x"], &["new\nline", "x"]).mounted(),
        Form::entries("odd names", &odd, &odd).mounted(),
        Form::entries("odd names at GCS", &odd, &odd).with(Manners { api: Api::Gcs, ..Manners::default() }),
        Form::entries("keys encoded without being asked", &odd, &odd).with(encoding(KeyEncoding::Always)),
        Form::entries("keys never encoded", &odd, &odd).with(encoding(KeyEncoding::Never)),
        Form::entries("XML with indentation", &odd, &odd).with(xml(XmlForm::Pretty)),
        Form::entries("XML with a namespace prefix", &odd, &odd).with(xml(XmlForm::Prefixed)),
        Form::entries("XML with attributes", &odd, &odd).with(xml(XmlForm::Attributes)),
        Form::entries("XML with CDATA", &odd[..ODD_NAMES.len()], &odd[..ODD_NAMES.len()])
            .with(xml(XmlForm::Cdata)),
        Form::entries("XML with character references", &odd, &odd).with(xml(XmlForm::References)),
        Form::entries("XML with unknown elements", &odd, &odd).with(xml(XmlForm::UnknownElements)),
    ]);
}
