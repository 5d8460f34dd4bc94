// Command etcd is the etcd server as its own project ships it; only the module that provides the main
// package there cannot be built from outside its repository.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
