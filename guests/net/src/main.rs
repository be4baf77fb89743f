//! A command that reaches outside, in the way its first argument names, and prints what came back.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};

use wasip2::http::types::{Fields, OutgoingRequest, Scheme};
use wasip2::io::streams::StreamError;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let target = args.get(1).map_or("", String::as_str);
    let answer = match args.first().map(String::as_str) {
        Some("tcp") => tcp(target),
        Some("udp") => udp(target),
        Some("listen") => listen(target),
        Some("http") => http(target),
        _ => Err("tcp, udp, listen or http, and an address".to_owned()),
    };
    match answer {
        Ok(text) => print!("{text}"),
        Err(why) => {
            eprintln!("{why}");
            std::process::exit(1);
        }
    }
}

fn tcp(address: &str) -> Result<String, String> {
    let mut stream = TcpStream::connect(address).map_err(|e| format!("connect: {e}"))?;
    stream.write_all(b"ping\n").map_err(|e| format!("write: {e}"))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(|e| format!("read: {e}"))?;
    Ok(text)
}

fn udp(address: &str) -> Result<String, String> {
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(|e| format!("bind: {e}"))?;
    socket.send_to(b"ping", address).map_err(|e| format!("send: {e}"))?;
    let mut answer = [0; 64];
    let (len, _) = socket.recv_from(&mut answer).map_err(|e| format!("receive: {e}"))?;
    Ok(String::from_utf8_lossy(&answer[..len]).into_owned())
}

/// Says where it listens, and answers one connection.
fn listen(address: &str) -> Result<String, String> {
    let listener = TcpListener::bind(address).map_err(|e| format!("listen: {e}"))?;
    println!("{}", listener.local_addr().map_err(|e| e.to_string())?);
    let (mut stream, _) = listener.accept().map_err(|e| format!("accept: {e}"))?;
    stream.write_all(b"pong\n").map_err(|e| format!("write: {e}"))?;
    Ok("answered\n".to_owned())
}

fn http(address: &str) -> Result<String, String> {
    let request = OutgoingRequest::new(Fields::new());
    request.set_scheme(Some(&Scheme::Http)).map_err(|()| "the scheme")?;
    request.set_authority(Some(address)).map_err(|()| "the authority")?;
    request.set_path_with_query(Some("/")).map_err(|()| "the path")?;
    let response = wasip2::http::outgoing_handler::handle(request, None).map_err(|e| format!("{e:?}"))?;
    response.subscribe().block();
    let response = response.get().ok_or("not there")?.map_err(|()| "taken")?.map_err(|e| format!("{e:?}"))?;
    let body = response.consume().map_err(|()| "the body")?;
    let stream = body.stream().map_err(|()| "the stream")?;
    let mut bytes = Vec::new();
    loop {
        match stream.blocking_read(4096) {
            Ok(more) => bytes.extend(more),
            Err(StreamError::Closed) => break,
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(format!("{} {}", response.status(), String::from_utf8_lossy(&bytes)))
}
