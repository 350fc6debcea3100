<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="en"><context><name>M</name><message><source>&amp;Open %1
it</source><translation type="unfinished"></translation></message><message numerus="yes"><source>%n file(s)</source><translation type="unfinished"><numerusform></numerusform></translation></message><message><source>x y</source><translation>done</translation></message></context></TS>