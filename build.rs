//! Compiles `proto/` without `protoc`, into messages, and into descriptors by which JSON is read.

#![expect(clippy::disallowed_methods, reason = "cargo speaks to build scripts by the environment")]

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use protox::prost_reflect::prost::Message;
use protox::prost_reflect::prost_types::{DescriptorProto, FileDescriptorProto};

const PROXY_CONFIG: &str = "mesh/v1alpha1/proxy.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto");
    let files = ["security/v1alpha1/ca.proto", "grpc/health/v1/health.proto", PROXY_CONFIG];
    let own = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".istio.mesh")
        // They hold tokens.
        .skip_debug([".istio.mesh"])
        .compile_fds(own)?;
    let read_as_json =
        [("wasm.fds", "envoy/extensions/wasm/v3/wasm.proto"), ("proxy_config.fds", PROXY_CONFIG)];
    for (name, file) in read_as_json {
        let mut compiler = protox::Compiler::new(["proto"])?;
        compiler.include_imports(true).include_source_info(false);
        compiler.open_file(file)?;
        let mut files = compiler.file_descriptor_set();
        files.file.insert(0, options());
        let path = Path::new(&env::var("OUT_DIR")?).join(name);
        fs::write(path, files.encode_to_vec())?;
    }
    if env::var("PROFILE")? == "release" && env::var("CARGO_CFG_TARGET_OS")? == "linux" {
        leave_out_unwind_tables()?;
    }
    Ok(())
}

/// Links the agent without the tables by which a panic unwinds the stack, 0.8 MB: a release aborts. What `perf` and gdb show
/// comes from frame pointers.
fn leave_out_unwind_tables() -> Result<(), Box<dyn Error>> {
    let script = Path::new(&env::var("OUT_DIR")?).join("no_unwind_tables.ld");
    fs::write(&script, "SECTIONS { /DISCARD/ : { *(.eh_frame) } } INSERT AFTER .text;\n")?;
    for argument in ["--no-eh-frame-hdr", &format!("-T,{}", script.display())] {
        println!("cargo::rustc-link-arg-bin=pilot-agent=-Wl,{argument}");
    }
    Ok(())
}

/// The types of options, without their members. Where they are missing, prost-reflect takes them from
/// its own definitions of all well-known types, and keeps those: 0.4 MB.
fn options() -> FileDescriptorProto {
    let types = ["File", "Message", "Field", "Enum", "EnumValue", "Oneof"];
    let message =
        |of| DescriptorProto { name: Some(format!("{of}Options")), ..DescriptorProto::default() };
    FileDescriptorProto {
        name: Some("google/protobuf/descriptor.proto".to_owned()),
        package: Some("google.protobuf".to_owned()),
        message_type: types.map(message).into(),
        ..FileDescriptorProto::default()
    }
}
